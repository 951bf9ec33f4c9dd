"""Tiny configurations of every family, with rare options. `LONG` tokens reach beyond the
original positions of the scaled rotary embeddings and beyond every window."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

LONG = 40

_TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 97,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _case(family: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": family, **_TINY, **fields}


def _gpt_neox(**fields: Any) -> dict[str, Any]:
    case = _case("gpt_neox", **fields)
    del case["num_key_value_heads"]
    return case


def _deepseek(**fields: Any) -> dict[str, Any]:
    sizes = {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "num_nextn_predict_layers": 0,
    }
    return _case("deepseek_v3", **(sizes | fields))


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.8, 2.0],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 9.0],
}

CASES: dict[str, dict[str, Any]] = {
    "llama": _case("llama"),
    "llama-one-kv-head-tied": _case(
        "llama", num_key_value_heads=1, tie_word_embeddings=True, rms_norm_eps=1e-5
    ),
    "llama-full-kv-heads-biases": _case(
        "llama", num_key_value_heads=4, attention_bias=True, mlp_bias=True
    ),
    "llama-wide-heads": _case("llama", head_dim=20),
    "llama-padding-row": _case("llama", pad_token_id=5, tie_word_embeddings=True),
    "llama-gelu": _case("llama", hidden_act="gelu"),
    "llama-rope-theta-older": _case("llama", rope_theta=500.0),
    "llama-rope-theta-newer": _case(
        "llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    ),
    "llama-linear": _case("llama", rope_scaling={"type": "linear", "factor": 2.5}),
    "llama-llama3-older": _case("llama", rope_theta=5e5, rope_scaling=_LLAMA3),
    "llama-llama3-newer": _case("llama", rope_parameters={**_LLAMA3, "rope_theta": 5e5}),
    "llama-yarn": _case("llama", rope_scaling=_YARN),
    "llama-yarn-tuned": _case(
        "llama",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "attention_factor": 0.8,
            "truncate": False,
        },
    ),
    "llama-yarn-mscale": _case(
        "llama", rope_scaling={**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3}
    ),
    "llama-dynamic-within-positions": _case(
        "llama", rope_scaling={"type": "dynamic", "factor": 3.0}
    ),
    "mistral-window": _case("mistral", sliding_window=7),
    "mistral-no-window": _case("mistral", sliding_window=None, head_dim=16),
    "qwen2": _case("qwen2"),
    "qwen2-window-from-layer-1": _case(
        "qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen2-layer-types-tied": _case(
        "qwen2",
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        tie_word_embeddings=True,
    ),
    "qwen3": _case("qwen3", head_dim=16),
    "qwen3-biases-window": _case(
        "qwen3",
        head_dim=16,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=2,
    ),
    "phi3": _case("phi3"),
    "phi3-window-partial": _case("phi3", sliding_window=8, partial_rotary_factor=0.5),
    "phi3-longrope-long": _case(
        "phi3", original_max_position_embeddings=16, rope_scaling=_LONGROPE
    ),
    "phi3-longrope-short": _case(
        "phi3", original_max_position_embeddings=50, rope_scaling=_LONGROPE
    ),
    "phi3-longrope-newer": _case(
        "phi3",
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.2, 1.4],
            "long_factor": [1.0, 3.0, 5.0],
        },
    ),
    "gemma2": _case(
        "gemma2", head_dim=16, sliding_window=6, query_pre_attn_scalar=20, num_hidden_layers=4
    ),
    "gemma2-soft-caps-bite": _case(
        "gemma2",
        head_dim=12,
        sliding_window=50,
        attn_logit_softcapping=0.7,
        final_logit_softcapping=1.5,
        attention_bias=True,
    ),
    "gemma2-no-caps": _case(
        "gemma2",
        head_dim=12,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        sliding_window=6,
    ),
    "gemma3_text-older": _case(
        "gemma3_text",
        head_dim=16,
        sliding_window=6,
        sliding_window_pattern=2,
        rope_theta=5e4,
        rope_local_base_freq=300.0,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
        query_pre_attn_scalar=24,
    ),
    "gemma3_text-newer": _case(
        "gemma3_text",
        head_dim=16,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
        pad_token_id=0,
        final_logit_softcapping=2.0,
    ),
    "olmo2": _case("olmo2", num_key_value_heads=2),
    # Wide initial weights: without norms before attention, biases would drown the tokens'
    # differences, and gradients that cancel to zero are fp32 rounding, in transformers as much as
    # here.
    "olmo2-biases-tied": _case(
        "olmo2",
        attention_bias=True,
        tie_word_embeddings=True,
        pad_token_id=1,
        initializer_range=0.2,
    ),
    "granite": _case(
        "granite",
        embedding_multiplier=12.0,
        logits_scaling=8.0,
        residual_multiplier=0.22,
        attention_multiplier=0.015625,
        tie_word_embeddings=True,
    ),
    "granite-biases": _case("granite", residual_multiplier=0.5, attention_bias=True, mlp_bias=True),
    "smollm3": _case("smollm3", num_hidden_layers=4, no_rope_layer_interval=2),
    "smollm3-untied-listed": _case(
        "smollm3",
        tie_word_embeddings=False,
        no_rope_layers=[0, 1, 0],
        use_sliding_window=True,
        sliding_window=7,
        attention_bias=True,
    ),
    "gpt2": dict(_GPT2),
    "gpt2-inverse-layer-scale": {
        **_GPT2,
        "scale_attn_by_inverse_layer_idx": True,
        "reorder_and_upcast_attn": True,
        "n_inner": 70,
        "activation_function": "gelu",
    },
    "gpt2-untied-unscaled": {
        **_GPT2,
        "tie_word_embeddings": False,
        "scale_attn_weights": False,
        "activation_function": "relu",
    },
    "gpt_neox": _gpt_neox(rotary_pct=0.5),
    "gpt_neox-odd-rotary-width": _gpt_neox(num_attention_heads=8),
    "gpt_neox-sequential-tied": _gpt_neox(
        use_parallel_residual=False, tie_word_embeddings=True, rotary_pct=1.0
    ),
    "gpt_neox-no-attention-bias-newer": _gpt_neox(
        attention_bias=False,
        hidden_act="gelu_new",
        rope_parameters={"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5},
    ),
    "mixtral": _case("mixtral", num_local_experts=4),
    "mixtral-window-narrow": _case(
        "mixtral",
        num_local_experts=5,
        num_experts_per_tok=3,
        sliding_window=7,
        intermediate_size=30,
    ),
    "qwen3_moe": _case(
        "qwen3_moe", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, head_dim=16
    ),
    "qwen3_moe-some-dense-normalised": _case(
        "qwen3_moe",
        num_hidden_layers=4,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=28,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=9,
    ),
    "olmoe": _case("olmoe", num_experts=6, num_experts_per_tok=2),
    "olmoe-normalised-biases": _case(
        "olmoe", num_experts=3, num_experts_per_tok=2, norm_topk_prob=True, attention_bias=True
    ),
    "gpt_oss": _case(
        "gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=8
    ),
    "gpt_oss-clamps-bite": _case(
        "gpt_oss",
        num_local_experts=3,
        num_experts_per_tok=3,
        head_dim=12,
        sliding_window=5,
        swiglu_limit=0.05,
        swiglu_alpha=3.0,
        attention_bias=False,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_scaling={"rope_type": "default"},
        initializer_range=0.2,
    ),
    "deepseek_v3": _deepseek(),
    "deepseek_v3-plain-queries-one-group": _deepseek(
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        n_shared_experts=2,
        norm_topk_prob=False,
        rope_interleave=False,
        v_head_dim=12,
    ),
    "deepseek_v3-yarn-biases": _deepseek(
        attention_bias=True,
        first_k_dense_replace=0,
        rope_scaling={**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        v_head_dim=16,
        routed_scaling_factor=1.0,
    ),
}


def skip_unless_supported(hf_model: nn.Module, config: dict[str, Any]) -> None:
    """Skip if an older version of transformers ignores the configuration of gpt_oss's clamp."""
    limits = {float(part.limit) for part in hf_model.modules() if hasattr(part, "limit")}
    if "swiglu_limit" in config and limits != {config["swiglu_limit"]}:
        pytest.skip(
            f"this version of transformers ignores swiglu_limit {config['swiglu_limit']}: "
            f"it clamps at {limits}"
        )
