"""Model shapes of the GPU benchmark: config.json values, number and length of sequences of a step,
and what is trained.

The batches of the first shapes fit on a device of 80 to 141 GB with the contender that needs most
(all logits in fp32), so that every case has several contenders. A case that does not fit is
reported as out of memory. The others have settings, of which the planner takes the first that fit
the device (`benchmarks.gpu_fit`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

_LLAMA_3: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


_LLAMA_3_8B: dict[str, Any] = _LLAMA_3 | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}

_GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}

_QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "router_aux_loss_coef": 0.001,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}

_RANK = 16


@dataclass(frozen=True)
class Settings:
    """Settings of a step besides compilation."""

    recompute: bool = False
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    has_offloaded_moments: bool = False
    """True if the optimizer's moments are in host memory."""
    has_bf16_weights: bool = False
    """True if weights, gradients and moments are stored in bf16, as torchtune stores them."""


@dataclass(frozen=True)
class Shape:
    """A model and its batches: sequence length -> sequences per step."""

    config: dict[str, Any]
    micro_batch_sizes: dict[int, int]
    part: int = 4
    """Part of `make gpu` with its cases."""
    variants: tuple[str, ...] = ("", "-compile", "-recompute", "-compile-recompute")
    """Keys of `gpu_case.VARIANTS`."""
    lora_rank: int | None = None
    """Rank of adapters of all projections; None: every weight is trained."""
    settings: tuple[Settings, ...] = ()
    """The case takes the first ones that fit the device with a margin. Empty: it is run as it is,
    whether it fits or not."""
    has_fitted_layers: bool = False
    """True if the model has as many layers as fit, at most those of `config`."""
    has_peers: bool = True
    """False if other contenders cannot run it, or not with the same settings: torchtune runs what
    is stored in bf16."""
    compared_with: str = ""
    """Shape whose MFU is the measure of this one's; its cases have the same lengths."""


def _build_fitted_shape(
    config: dict[str, Any],
    micro_batch_sizes: dict[int, int],
    *,
    part: int,
    lora_rank: int | None = None,
) -> Shape:
    """Return a shape of another family than Llama, with as many layers as fit the device."""
    return Shape(
        config,
        micro_batch_sizes,
        part=part,
        variants=("-compile",),
        lora_rank=lora_rank,
        settings=(Settings(),),
        has_fitted_layers=True,
        has_peers=False,
        compared_with="llama-3-8b-12-layers" if lora_rank is None else "llama-3-8b-lora",
    )


SHAPES = {
    "llama-3.2-1b": Shape(
        _LLAMA_3
        | {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
        },
        {4096: 4, 8192: 2},
    ),
    "llama-3.2-3b": Shape(
        _LLAMA_3
        | {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        {4096: 2, 8192: 1},
        part=5,
    ),
    # 12 of 32 layers: with all, 16 bytes per parameter would fill a 141 GB device before the
    # first activation.
    "llama-3-8b-12-layers": Shape(
        _LLAMA_3_8B | {"num_hidden_layers": 12},
        {4096: 2, 8192: 1},
        part=6,
    ),
    "llama-3-8b-12-layers-bf16-weights": Shape(
        _LLAMA_3_8B | {"num_hidden_layers": 12},
        {4096: 2, 8192: 1},
        part=10,
        variants=("-compile",),
        settings=(Settings(has_bf16_weights=True),),
        has_peers=False,
        compared_with="llama-3-8b-12-layers",
    ),
    "llama-3-8b-lora": Shape(
        _LLAMA_3_8B,
        {4096: 2, 8192: 1},
        part=8,
        variants=("-compile",),
        lora_rank=_RANK,
        settings=(Settings(), Settings(recompute=True)),
    ),
    "llama-3-8b": Shape(
        _LLAMA_3_8B,
        {4096: 2, 8192: 1},
        part=9,
        variants=("-compile",),
        settings=(
            Settings(),
            Settings(recompute=True),
            Settings(recompute=True, optimizer="adamw_8bit"),
            Settings(recompute=True, has_offloaded_moments=True),
        ),
        has_peers=False,
    ),
    "llama-3-8b-bf16-weights": Shape(
        _LLAMA_3_8B,
        {4096: 2, 8192: 1},
        part=9,
        variants=("-compile",),
        settings=(
            Settings(has_bf16_weights=True),
            Settings(has_bf16_weights=True, recompute=True),
            Settings(has_bf16_weights=True, recompute=True, optimizer="adamw_8bit"),
        ),
        has_peers=False,
    ),
    "gemma-2-9b": _build_fitted_shape(
        {
            "model_type": "gemma2",
            "architectures": ["Gemma2ForCausalLM"],
            "vocab_size": 256000,
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "hidden_activation": "gelu_pytorch_tanh",
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        {4096: 2, 8192: 1},
        part=9,
    ),
    "gpt-oss-20b": _build_fitted_shape(
        _GPT_OSS_20B,
        {4096: 2, 8192: 1},
        part=10,
    ),
    "gpt-oss-20b-lora": _build_fitted_shape(
        _GPT_OSS_20B,
        {8192: 1},
        part=10,
        lora_rank=_RANK,
    ),
    "qwen3-30b-a3b": _build_fitted_shape(
        _QWEN3_30B_A3B,
        {4096: 2},
        part=10,
    ),
    "qwen3-30b-a3b-lora": _build_fitted_shape(
        _QWEN3_30B_A3B,
        {4096: 2},
        part=10,
        lora_rank=_RANK,
    ),
}

_TINY = _LLAMA_3 | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}

TINY = {
    "tiny": Shape(_TINY, {64: 2}),
    "tiny-lora": Shape(
        _TINY,
        {64: 2},
        variants=("",),
        lora_rank=4,
        settings=(Settings(recompute=True),),
        has_fitted_layers=True,
    ),
}
"""Shapes that rehearse the benchmark itself on any device; the numbers have no meaning."""
