"""Steps and frozen names."""

from __future__ import annotations

import pytest

from shardwright.config.load import validate_recipe
from shardwright.errors import DataError, RecipeError
from shardwright.train.preflight import count_steps, match_frozen


def recipe_with(**training: float):
    return validate_recipe(
        {
            "model": {"config": {"model_type": "llama"}},
            "data": {"sources": "corpus.txt"},
            "training": {"sequence_length": 8, "learning_rate": 1e-3, "micro_batch_size": 1, **training},
        }
    )


@pytest.mark.parametrize(
    ("training", "expected"),
    [({"max_steps": 7}, 7), ({"num_epochs": 2}, 20), ({"num_epochs": 0.5}, 5), ({"num_epochs": 2, "max_steps": 7}, 7)],
)
def test_whichever_ends_first(training: dict[str, float], expected: int) -> None:
    assert count_steps(recipe_with(**training), num_samples=100, global_batch_size=10) == expected


def test_too_few_samples_for_one_step() -> None:
    with pytest.raises(DataError, match="do not fill one global batch of 10"):
        count_steps(recipe_with(num_epochs=1), num_samples=9, global_batch_size=10)


def test_frozen_patterns_must_match() -> None:
    names = ["h.0.weight", "h.0.bias", "ln.bias"]
    assert match_frozen(("*.bias",), names) == {"h.0.bias", "ln.bias"}
    for patterns in (("*.biass",), ("*",)):
        with pytest.raises(RecipeError, match=r"model\.freeze"):
            match_frozen(patterns, names)
