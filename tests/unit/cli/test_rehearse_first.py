"""`train --rehearse-first`: what stops a run before any rank starts."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.cli import rehearse, train
from shardwright.config import Recipe
from shardwright.config.recipe_loading import validate_recipe
from shardwright.errors import CheckFailed, InputError
from tests.unit.planner import models


class Rehearsed:
    """What a rehearsal found."""

    def __init__(self, peak_bytes: int, disagreement: str | None = None) -> None:
        self.peak_bytes = peak_bytes
        self.disagreement = disagreement


def recipe(**sections: Any) -> Recipe:
    training = {"sequence_length": 64, "micro_batch_size": 1, "learning_rate": 1e-3, "max_steps": 1}
    given = {
        "model": {"config": models.CONFIGS["llama"]},
        "data": {"sources": ["nowhere"]},
        "training": training,
    }
    return validate_recipe({**given, **sections})


def test_ranks_that_a_launcher_started_are_not_rehearsed_each() -> None:
    with pytest.raises(InputError, match="already been started"):
        train._rehearse_first(recipe(), 2, is_launched=True)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (Rehearsed(1, "rank 1 skips an all_reduce"), "rank 1 skips"),
        (Rehearsed(100 * 2**30), "need 100 GiB"),
    ],
)
def test_what_cannot_run_is_told(
    monkeypatch: pytest.MonkeyPatch, found: Rehearsed, told: str
) -> None:
    monkeypatch.setattr(rehearse, "rehearse_and_print", lambda *_args, **_options: found)
    with pytest.raises(CheckFailed, match=told):
        train._rehearse_first(recipe(cluster="8xA100-80GB"), 8, is_launched=False)


def test_what_fits_and_agrees_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse, "rehearse_and_print", lambda *_args, **_options: Rehearsed(2**30))
    train._rehearse_first(recipe(cluster="8xA100-80GB"), 8, is_launched=False)
