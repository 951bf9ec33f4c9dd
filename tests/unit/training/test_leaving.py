"""Ranks that leave after a number of steps, because more ranks continue the run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from shardwright.config import Recipe
from shardwright.errors import GenerationEnded, Preempted
from shardwright.launch.elastic import Restart
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.launch.stop_signals import StopRequest
from shardwright.telemetry.event_log import (
    CheckpointEvent,
    FailureEvent,
    PreemptionEvent,
    ReshardEvent,
    RunFinishedEvent,
    StepEvent,
    WarningEvent,
    read_events,
)
from shardwright.training import checkpointing
from shardwright.training.rank_run import train_rank
from tests.unit.training.test_loop import FullDisk, build_recipe

SMALLER = Restart(1, 3, 1, "rank 1 was killed", former_world_size=2, leave_after_steps=2)


def build_saving_recipe(folder: Path) -> Recipe:
    """Build a recipe of five steps that is saved at its end only, except when ranks leave."""
    recipe = build_recipe(folder, max_steps=5)
    section = recipe.checkpoint.model_copy(update={"keep_best": False})
    return recipe.model_copy(update={"checkpoint": section})


def test_a_rank_saves_and_leaves(tmp_path: Path) -> None:
    recipe = build_saving_recipe(tmp_path)
    with pytest.raises(GenerationEnded) as ended:
        train_rank(recipe, RankEnvironment(), StopRequest(), restart=SMALLER)
    assert ended.value.step == 2
    events = read_events(tmp_path / "run")
    assert [event.step for event in events.filter_by_type(CheckpointEvent)] == [2]
    ends = (FailureEvent, PreemptionEvent, RunFinishedEvent, ReshardEvent)
    assert not any(isinstance(event, ends) for event in events)
    # The number of steps counts from where this generation starts.
    with pytest.raises(GenerationEnded) as ended:
        train_rank(recipe, RankEnvironment(), StopRequest(), resume=True, restart=SMALLER)
    assert ended.value.step == 4
    # No rank leaves after the last step.
    train_rank(recipe, RankEnvironment(), StopRequest(), resume=True, restart=SMALLER)
    steps = read_events(tmp_path / "run").filter_by_type(StepEvent)
    assert [event.step for event in steps] == [1, 2, 3, 4, 5]


def test_a_stop_is_more_urgent(tmp_path: Path) -> None:
    stop = StopRequest()
    stop.record(signal.SIGTERM)
    leaves_at_once = Restart(1, 3, 1, "died", former_world_size=2, leave_after_steps=1)
    with pytest.raises(Preempted):
        train_rank(build_saving_recipe(tmp_path), RankEnvironment(), stop, restart=leaves_at_once)


def test_a_rank_that_cannot_save_stays_and_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that left without a checkpoint would lose the steps since the one before."""
    monkeypatch.setattr(checkpointing, "get_disk", lambda _place: FullDisk())
    save = checkpointing.RunCheckpointer.save

    def save_to_full_disk(saver: checkpointing.RunCheckpointer, **options: bool) -> bool:
        FullDisk.full = saver.state.step == 2
        return save(saver, **options)

    monkeypatch.setattr(checkpointing.RunCheckpointer, "save", save_to_full_disk)
    with pytest.raises(GenerationEnded) as ended:
        train_rank(build_saving_recipe(tmp_path), RankEnvironment(), StopRequest(), restart=SMALLER)
    assert ended.value.step == 4
    events = read_events(tmp_path / "run")
    assert [event.step for event in events.filter_by_type(CheckpointEvent)] == [4]
    assert any(
        "No space left on device" in event.message for event in events.filter_by_type(WarningEvent)
    )
