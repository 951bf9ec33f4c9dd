"""Small pairs of responses, and a recipe that uses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwright.config.recipe_loading import parse_layout

ROWS = [
    {
        "prompt": f"{a}+{b}=",
        "chosen": f"{a + b}",
        "rejected": f"{a + b + 1 + (a * b) % 3} or {'so' * (a % 4)}",
    }
    for a in range(6)
    for b in range(5)
]


def write_pairs(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def preference_recipe(folder: Path, layout: str = "", **changes: Any) -> dict[str, Any]:
    """Build a recipe document; each section of `changes` overrides keys of the default section."""
    source = folder / "pairs.jsonl"
    if not source.exists():
        write_pairs(source)
    document: dict[str, Any] = {
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 24,
                "intermediate_size": 20,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 6,
                "max_position_embeddings": 64,
            },
            "loss_chunk_tokens": 7,
        },
        "tokenizer": {"kind": "bpe", "vocab_size": 263},
        "data": {"sources": str(source), "cache_dir": str(folder / "cache")},
        "preference": {"kind": "dpo", "beta": 0.5, "label_smoothing": 0.1},
        "precision": {"kind": "fp32"},
        "training": {
            "sequence_length": 48,
            "global_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "max_steps": 3,
            "learning_rate": 1e-2,
            "schedule": "constant",
        },
        "layout": parse_layout(layout) if layout else {},
        "run": {"device": "cpu", "dir": str(folder / "run")},
    }
    return document | {key: (document.get(key) or {}) | value for key, value in changes.items()}
