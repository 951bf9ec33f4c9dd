"""Sizes of models that tables give by name only, from `load_named_sizes.yaml`."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

SIZE_COLUMNS = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab")
"""Columns that the file lists for every model, in its order."""

BILLIONS_PATTERN = r"(?<![\dx.a-z])(\d+(?:\.\d+)?) ?b(?![a-z0-9]|[ -]*activ)"
"""Number of billions in a model's name, but not the experts of a mixture (8x7b) or active
parameters (a3b)."""
_SIZE_PATTERN = r"(?<![\dx.a-z])\d+(?:\.\d+)? ?[bm](?![a-z0-9]|[ -]*activ)"


@cache
def load_named_sizes() -> dict[str, dict[str, Any]]:
    """Load the file: patterns of names -> sizes of the matching models."""
    text = (files("shardwright.planner.published") / "named_sizes.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


@cache
def _compile_patterns() -> tuple[tuple[re.Pattern[str], dict[str, Any]], ...]:
    # A point between digits is no separator: Llama 2 7B is not Llama 2.7B.
    separator = r"(?:[-_ /()]|\.(?!\d)|(?<!\d)\.)*"
    return tuple(
        (
            re.compile(
                f"(?<![a-z0-9])(?:{re.sub(' [?]?', lambda _: separator, words)})(?![a-z0-9])"
            ),
            sizes,
        )
        for words, sizes in load_named_sizes().items()
    )


@cache
def find_sizes(name: str) -> dict[str, Any] | None:
    """Return the sizes of the model that a lower-case name denotes, None if unknown.

    An additional size in the name denotes another model: GPT-3 has 175 billion parameters,
    GPT-3 6.7B does not.

    >>> (find_sizes("meta-llama-3.1-8b-instruct") or {})["sizes"], find_sizes("gpt-3-6.7b")
    ([32, 4096, 32, 8, 14336, 128256], None)
    """
    for pattern, sizes in _compile_patterns():
        match = pattern.search(name)
        if match and not re.search(_SIZE_PATTERN, f"{name[: match.start()]} {name[match.end() :]}"):
            return sizes
    return None
