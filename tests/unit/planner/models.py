"""Small models and a cluster that the planner's tests share."""

from __future__ import annotations

from typing import Any

from shardwright.architecture import ModelShape, read_config
from shardwright.hardware import Accelerator, Cluster, Link
from shardwright.planner.candidate import Candidate
from shardwright.planner.predictor import Predictor

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": None,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "tied": {"model_type": "llama", **SIZES, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 32},
    "gemma2": {
        "model_type": "gemma2", **SIZES, "head_dim": 32, "query_pre_attn_scalar": 32,
        "sliding_window": 64,
    },
    "olmo2": {"model_type": "olmo2", **SIZES},
    "phi3": {"model_type": "phi3", **SIZES, "original_max_position_embeddings": 512},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 1000, "n_embd": 256, "n_head": 8, "n_layer": 4,
        "n_positions": 512,
        "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    },
    "gpt_neox": {
        "model_type": "gpt_neox", "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8, "max_position_embeddings": 512,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **SIZES,
        "num_key_value_heads": 8,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", **SIZES, "head_dim": 32, "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128, "mlp_only_layers": [0],
    },
}  # fmt: skip

LLAMA2_13B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "max_position_embeddings": 4096,
}

LLAMA3_405B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


def read_shape(name: str) -> ModelShape:
    """Read the shape of one of `CONFIGS`."""
    return read_config(CONFIGS[name])


def make_cluster(
    num_gpus: int = 4, *, memory_bytes: float = 2**30, per_node: int | None = None
) -> Cluster:
    """Return devices of 1 TFLOP/s and 100 GB/s; 10 GB/s within a node, 1 GB/s between nodes."""
    device = Accelerator("test", int(memory_bytes), 1e11, {"bf16": 1e12, "fp32": 5e11})
    per_node = per_node or num_gpus
    fast = Link("fast", "nvlink", 1e10, 1e-6)
    slow = Link("slow", "infiniband", 1e9, 5e-6)
    return Cluster(device, per_node, num_gpus // per_node, fast, slow)


def compute_pass_seconds(predictor: Predictor, candidate: Candidate) -> float:
    """Return the seconds of a micro-batch through all stages."""
    step = predictor.build_step(candidate)
    return sum(step.stage_seconds[kind].total for kind in step.pipeline.partition.kind_of_stage)
