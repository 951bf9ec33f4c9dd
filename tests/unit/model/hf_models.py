"""Small configurations of families that run through transformers' classes."""

from __future__ import annotations

from typing import Any

_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_ATTENTION = {
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
}

SPARSE_HF_CONFIG: dict[str, Any] = {
    "model_type": "qwen2_moe",
    "vocab_size": 61,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 20,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    **_ATTENTION,
    **_IDS,
}
"""A sparse family that runs through transformers' class."""

HF_CONFIGS: dict[str, dict[str, Any]] = {
    "opt": {
        "model_type": "opt",
        "vocab_size": 61,
        "hidden_size": 20,
        "word_embed_proj_dim": 20,
        "ffn_dim": 28,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        **_IDS,
    },
    "phi": {"model_type": "phi", "vocab_size": 61, "num_hidden_layers": 2, **_ATTENTION, **_IDS},
    "mamba": {
        "model_type": "mamba",
        "vocab_size": 61,
        "hidden_size": 20,
        "num_hidden_layers": 2,
        "state_size": 5,
        **_IDS,
    },
    "cohere": {
        "model_type": "cohere",
        "vocab_size": 61,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        **_ATTENTION,
        **_IDS,
    },
    "bloom": {
        "model_type": "bloom",
        "vocab_size": 61,
        "hidden_size": 20,
        "n_layer": 2,
        "n_head": 4,
        **_IDS,
    },
    "falcon": {
        "model_type": "falcon",
        "vocab_size": 61,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        **_IDS,
    },
}
