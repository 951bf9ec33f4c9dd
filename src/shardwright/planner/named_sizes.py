"""Sizes of models that tables name without them: `named_sizes.yaml`, found by what their names say. Torch-free."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab")
"""Columns that the file gives of every model, in its order."""

BILLIONS = r"(?<![\dx.a-z])(\d+(?:\.\d+)?) ?b(?![a-z0-9]|[ -]*activ)"
"""A number of billions in a model's name; neither experts of a mixture (8x7b) nor active parameters (a3b)."""
_ANY_SIZE = r"(?<![\dx.a-z])\d+(?:\.\d+)? ?[bm](?![a-z0-9]|[ -]*activ)"


@cache
def named_sizes() -> dict[str, dict[str, Any]]:
    """Patterns of names -> sizes of the models that bear them, as the file has them."""
    text = (files("shardwright.planner") / "named_sizes.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], dict[str, Any]], ...]:
    apart = r"(?:[-_ /()]|\.(?!\d)|(?<!\d)\.)*"  # a point between digits is no gap: Llama 2 7B is not Llama 2.7B
    return tuple(
        (re.compile(f"(?<![a-z0-9])(?:{re.sub(' [?]?', lambda _: apart, words)})(?![a-z0-9])"), sizes)
        for words, sizes in named_sizes().items()
    )


@cache
def sizes_of_name(name: str) -> dict[str, Any] | None:
    """The sizes of the model that a name in small letters means, None where none is known.

    A size beside the name that is not the model's own is another model's: GPT-3 has 175 billion parameters, GPT-3 6.7B has not.

    >>> (sizes_of_name("meta-llama-3.1-8b-instruct") or {})["sizes"], sizes_of_name("gpt-3-6.7b")
    ([32, 4096, 32, 8, 14336, 128256], None)
    """
    for pattern, sizes in _patterns():
        found = pattern.search(name)
        if found and not re.search(_ANY_SIZE, f"{name[: found.start()]} {name[found.end() :]}"):
            return sizes
    return None
