"""Model shapes of the GPU benchmark: config.json values, and number and length of sequences of a
step.

The batches fit on a device of 80 to 141 GB with the contender that needs most (all logits in fp32),
so that every case has several contenders. A case that does not fit is reported as out of memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Shape:
    """A model and its batches: sequence length -> sequences per step."""

    config: dict[str, Any]
    micro_batch_sizes: dict[int, int]


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
    ),
    # 12 of 32 layers: with all, 16 bytes per parameter would fill a 141 GB device before the
    # first activation.
    "llama-3-8b-12-layers": Shape(
        _LLAMA_3
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 12,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
        {4096: 2, 8192: 1},
    ),
}

TINY = {
    "tiny": Shape(
        _LLAMA_3
        | {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        },
        {64: 2},
    )
}
"""Shapes that rehearse the benchmark itself on any device; the numbers have no meaning."""
