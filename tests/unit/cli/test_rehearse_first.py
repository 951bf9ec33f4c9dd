"""`train --rehearse-first` stops a run before any rank starts."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.cli import rehearse, train
from shardwright.config import Recipe
from shardwright.config.recipe_loading import validate_recipe
from shardwright.errors import CheckFailed, InputError
from tests.unit.planner import models


class FakeRehearsal:
    """Result of a rehearsal."""

    def __init__(self, peak_bytes: int, disagreement: str | None = None) -> None:
        self.peak_bytes = peak_bytes
        self.disagreement = disagreement


def make_recipe(**sections: Any) -> Recipe:
    training = {"sequence_length": 64, "micro_batch_size": 1, "learning_rate": 1e-3, "max_steps": 1}
    defaults = {
        "model": {"config": models.CONFIGS["llama"]},
        "data": {"sources": ["nowhere"]},
        "training": training,
    }
    return validate_recipe({**defaults, **sections})


def test_ranks_of_an_external_launcher_do_not_rehearse() -> None:
    with pytest.raises(InputError, match="already been started"):
        train._rehearse_first(make_recipe(), 2, is_launched=True)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (FakeRehearsal(1, "rank 1 skips an all_reduce"), "rank 1 skips"),
        (FakeRehearsal(100 * 2**30), "need 100 GiB"),
    ],
)
def test_a_run_that_cannot_work_is_refused(
    monkeypatch: pytest.MonkeyPatch, result: FakeRehearsal, message: str
) -> None:
    monkeypatch.setattr(rehearse, "rehearse_and_print", lambda *_args, **_options: result)
    with pytest.raises(CheckFailed, match=message):
        train._rehearse_first(make_recipe(cluster="8xA100-80GB"), 8, is_launched=False)


def test_a_run_that_fits_and_agrees_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rehearse, "rehearse_and_print", lambda *_args, **_options: FakeRehearsal(2**30)
    )
    train._rehearse_first(make_recipe(cluster="8xA100-80GB"), 8, is_launched=False)
