"""The small models that multi-process tests verify: widths that ranks do not divide, so every shard
is uneven somewhere.
"""

from __future__ import annotations

from typing import Any

from shardwright.config import Recipe
from shardwright.config.recipe_loading import validate_recipe

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


def recipe_of(config: dict[str, Any], **changes: Any) -> Recipe:
    """A recipe around a model; only what verification reads matters."""
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
