"""Frozen names."""

from __future__ import annotations

import pytest

from shardwright.errors import RecipeError
from shardwright.train.preflight import match_frozen


def test_frozen_patterns_must_match() -> None:
    names = ["h.0.weight", "h.0.bias", "ln.bias"]
    assert match_frozen(("*.bias",), names) == {"h.0.bias", "ln.bias"}
    for patterns in (("*.biass",), ("*",)):
        with pytest.raises(RecipeError, match=r"model\.freeze"):
            match_frozen(patterns, names)
