"""Parameters that a recipe freezes: patterns of `model.freeze`."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from shardwright.errors import RecipeError


def match_frozen(patterns: Sequence[str], names: Sequence[str]) -> frozenset[str]:
    """Return the names that match any of the patterns; raise if a pattern matches none.

    >>> sorted(match_frozen(("*.bias",), ["a.weight", "a.bias"]))
    ['a.bias']
    """
    frozen: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise RecipeError(
                "matches no parameter",
                field="model.freeze",
                got=pattern,
                allowed=f"a pattern such as {names[0]} or *.{names[-1].split('.')[-1]}",
            )
        frozen.update(matched)
    if len(frozen) == len(names):
        raise RecipeError(
            "every parameter would be frozen", field="model.freeze", got=", ".join(patterns)
        )
    return frozenset(frozen)
