"""Sizes of models that tables give by name only, from `named_sizes.yaml`."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab")
"""Columns that the file lists for every model, in its order."""

BILLIONS = r"(?<![\dx.a-z])(\d+(?:\.\d+)?) ?b(?![a-z0-9]|[ -]*activ)"
"""Number of billions in a model's name, but not the experts of a mixture (8x7b) or active
parameters (a3b)."""
_ANY_SIZE = r"(?<![\dx.a-z])\d+(?:\.\d+)? ?[bm](?![a-z0-9]|[ -]*activ)"


@cache
def named_sizes() -> dict[str, dict[str, Any]]:
    """Load the file: patterns of names -> sizes of the matching models."""
    text = (files("shardwright.planner") / "named_sizes.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], dict[str, Any]], ...]:
    # A point between digits is no separator: Llama 2 7B is not Llama 2.7B.
    separator = r"(?:[-_ /()]|\.(?!\d)|(?<!\d)\.)*"
    return tuple(
        (re.compile(f"(?<![a-z0-9])(?:{re.sub(' [?]?', lambda _: separator, words)})(?![a-z0-9])"), sizes)
        for words, sizes in named_sizes().items()
    )


@cache
def sizes_of_name(name: str) -> dict[str, Any] | None:
    """Return the sizes of the model that a lower-case name denotes, None if unknown.

    An additional size in the name denotes another model: GPT-3 has 175 billion parameters,
    GPT-3 6.7B does not.

    >>> (sizes_of_name("meta-llama-3.1-8b-instruct") or {})["sizes"], sizes_of_name("gpt-3-6.7b")
    ([32, 4096, 32, 8, 14336, 128256], None)
    """
    for pattern, sizes in _patterns():
        match = pattern.search(name)
        if match and not re.search(_ANY_SIZE, f"{name[: match.start()]} {name[match.end() :]}"):
            return sizes
    return None
