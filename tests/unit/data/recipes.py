"""Small recipes over files that a test writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwright.config import Recipe
from shardwright.config.recipe_loading import validate_recipe


def build_recipe(
    folder: Path,
    sources: Any,
    *,
    seed: int = 0,
    tokenizer: Any = "character",
    length: int = 8,
    **data: Any,
) -> Recipe:
    """Build a recipe that reads `sources` and has its cache below `folder`.

    `data` holds further keys of its data section.
    """
    return validate_recipe(
        {
            "seed": seed,
            "model": {"config": {"model_type": "gpt2"}},
            "tokenizer": {"kind": tokenizer} if isinstance(tokenizer, str) else tokenizer,
            "data": {"sources": sources, "cache_dir": str(folder / "cache"), **data},
            "precision": "fp32",
            "training": {
                "sequence_length": length,
                "micro_batch_size": 2,
                "max_steps": 1,
                "learning_rate": 1e-3,
            },
        }
    )


def write_text(path: Path, text: str) -> str:
    """Write a text file; returns its path as a recipe names it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8"))
    return str(path)


def write_json_lines(path: Path, texts: list[str], field: str = "text") -> str:
    """Write one record per text."""
    return write_text(path, "".join(json.dumps({field: text}) + "\n" for text in texts))


def story(number: int, num_words: int = 12) -> str:
    """Build a short text that is different for every number."""
    return " ".join(f"w{number * 7 + word}" for word in range(num_words)) + "."
