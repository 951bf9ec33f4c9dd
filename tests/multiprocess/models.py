"""Small models for multi-process tests.

The number of ranks does not divide their widths, so that some shards are uneven.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.architecture import ModelShape
from shardwright.config import Recipe
from shardwright.config.recipe_loading import validate_recipe
from shardwright.config.training import PrecisionSection
from shardwright.layout import Layout
from shardwright.model import Decoder
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics import ChunkedLoss, resolve_dtypes
from shardwright.parallel import ParallelModel, apply_layout, build_mesh
from shardwright.plans import BatchPlan, build_plan

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 20,
    "intermediate_size": 27,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 61,
    "n_embd": 20,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 20,
    "intermediate_size": 27,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
}
TENSOR_LLAMA = LLAMA | {"intermediate_size": 28}
"""LLAMA for up to four tensor ranks, pairs of which share its two key-value heads."""
_SPARSE_SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    **_SPARSE_SIZES,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    **_SPARSE_SIZES,
    "head_dim": 8,
    "sliding_window": 5,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "initializer_range": 0.2,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    **_SPARSE_SIZES,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_nextn_predict_layers": 0,
}


def compute_pruned_mask(narrow: Sequence[tuple[int, int]]) -> Tensor:
    """Return where a slice of a pruned matrix is zero: every third element of the whole matrix."""
    rows, columns = (torch.arange(start, start + length) for start, length in narrow)
    return (rows[:, None] + columns) % 3 == 0


def build_recipe(config: dict[str, Any], **changes: Any) -> Recipe:
    """Return a recipe for a model, valid as far as verification reads it."""
    return validate_recipe(
        {
            "model": {"config": config} | changes.pop("model", {}),
            "data": {"sources": "unread"},
            "precision": "fp32",
            "training": {
                "sequence_length": 12,
                "micro_batch_size": 2,
                "max_steps": 1,
                "learning_rate": 1.0,
            },
            **changes,
        }
    )


def build_model(
    shape: ModelShape,
    layout: Layout,
    batch: BatchPlan,
    precision: PrecisionSection,
    *,
    seed: int,
) -> ParallelModel:
    """Build a model on this rank's CPU, with weights by name and seed."""
    dtypes = resolve_dtypes(precision)
    with torch.device("meta"):
        loss = ChunkedLoss(8)
        decoder = Decoder(shape, loss_function=loss, compute_dtype=dtypes.compute)
    specs = {spec.name: spec for spec in shape.list_parameters()}
    return apply_layout(
        decoder,
        build_plan(shape, layout, batch, precision),
        build_mesh(layout, "cpu"),
        torch.device("cpu"),
        read_slice=lambda name, narrow: initialise_parameter(
            specs[name], seed, dtype=dtypes.param, narrow=narrow
        ),
    )
