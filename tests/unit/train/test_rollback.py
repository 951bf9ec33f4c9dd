"""Going back by itself, in one process: a loss that spikes, and gradients that stay non-finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.checkpoint.tensor_loading import find_newest_checkpoint, read_tensor
from shardwright.config.run import RollbackSection
from shardwright.errors import NonFiniteError
from shardwright.telemetry.event_log import (
    RollbackEvent,
    WarningEvent,
    read_events,
    select_surviving_steps,
)
from shardwright.train import loop
from shardwright.train.loop import TrainingLoop
from shardwright.train.rollback import LossSpikeDetector
from shardwright.train.run import train
from tests.unit.train.test_loop import recipe_in

BATCH = 2


def run(folder: Path, name: str, rollback: dict[str, Any] | None = None, **training: Any) -> Path:
    """Eight steps, saved every second one."""
    recipe = recipe_in(folder, name, max_steps=8, **training)
    section = recipe.checkpoint.model_copy(
        update={"every_steps": 2, "keep_last": 4, "keep_best": False, "asynchronous": False}
    )
    elastic = recipe.elastic.model_copy(
        update={"rollback": None if rollback is None else RollbackSection(**rollback)}
    )
    evaluation = recipe.evaluation.model_copy(update={"every_steps": None})
    train(
        recipe.model_copy(
            update={"checkpoint": section, "elastic": elastic, "evaluation": evaluation}
        )
    )
    return folder / name


def spike_at(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """The loss of these steps, counted as they are made, is a thousand times what it is; the
    gradients are as ever.
    """
    made = iter(range(1, 100))
    former = loop.accumulate_gradients

    def accumulate(*arguments: Any, **options: Any) -> Any:
        loss = former(*arguments, **options)
        return replace(loss, loss_sum=loss.loss_sum * 1000) if next(made) in steps else loss

    monkeypatch.setattr(loop, "accumulate_gradients", accumulate)


def poison_at(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """A gradient of these steps, counted as they are made, is not a number."""
    made = iter(range(1, 100))
    former = loop.update_parameters

    def update(model: Any, optimizer: Any, **options: Any) -> Any:
        if next(made) in steps:
            next(gradient for gradient, _ in model.list_gradients() if gradient is not None).view(
                -1
            )[0] = float("nan")
        return former(model, optimizer, **options)

    monkeypatch.setattr(loop, "update_parameters", update)


def leave_out(monkeypatch: pytest.MonkeyPatch, *, before_step: int, count: int) -> None:
    """From this step on, `count` steps' worth of data are passed over, by hand."""
    former: Callable[[TrainingLoop], Any] = TrainingLoop._run_step

    def step(running: TrainingLoop) -> Any:
        if running.state.step == before_step:
            running.state.skipped_data_steps = count
        return former(running)

    monkeypatch.setattr(TrainingLoop, "_run_step", step)


def assert_same_weights(one: Path, other: Path) -> None:
    ours = find_newest_checkpoint(one / "checkpoints")
    theirs = find_newest_checkpoint(other / "checkpoints")
    assert ours is not None
    assert theirs is not None
    assert ours.step == theirs.step == 8
    assert all(
        torch.equal(read_tensor(ours, name), read_tensor(theirs, name))
        for name in ours.manifest.tensors
    )


def test_a_spike_takes_the_run_back_and_past_the_data(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        spike_at(patch, {6})
        spiked = run(tmp_path, "spiked", {"window_steps": 3})
    events = read_events(spiked)
    (back,) = events.filter_by_type(RollbackEvent)
    assert (back.step, back.from_step, back.first_sample, back.num_samples) == (
        4,
        6,
        4 * BATCH,
        2 * BATCH,
    )
    seen = [(step.step, step.samples_seen // BATCH) for step in select_surviving_steps(events)]
    assert seen == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 7), (6, 8), (7, 9), (8, 10)]
    with pytest.MonkeyPatch.context() as patch:
        leave_out(patch, before_step=4, count=2)
        assert_same_weights(spiked, run(tmp_path, "by-hand"))


def test_a_checkpoint_farther_back_is_taken_where_the_recipe_wants_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spike_at(monkeypatch, {6})
    (back,) = read_events(
        run(tmp_path, "run", {"window_steps": 3, "at_least_steps_before": 3})
    ).filter_by_type(RollbackEvent)
    assert (back.step, back.num_samples) == (2, 4 * BATCH)


def test_rollbacks_are_bounded_and_what_comes_after_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spike_at(monkeypatch, {6, 10})
    events = read_events(run(tmp_path, "run", {"window_steps": 3, "max_rollbacks": 1}))
    assert len(events.filter_by_type(RollbackEvent)) == 1
    assert any(
        "no rollbacks are left (max_rollbacks is 1), so training continues" in event.message
        for event in events.filter_by_type(WarningEvent)
    )


def test_too_many_steps_without_a_finite_gradient_take_the_run_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_at(monkeypatch, {5, 6})
    with pytest.raises(NonFiniteError):
        run(tmp_path, "without", max_skipped_steps=1)
    poison_at(monkeypatch, {5, 6})
    (back,) = read_events(run(tmp_path, "with", {}, max_skipped_steps=1)).filter_by_type(
        RollbackEvent
    )
    assert (back.step, back.from_step) == (4, 6)
    assert "2 consecutive steps up to step 6" in back.reason


def test_moments_stay_clean_where_one_gradient_is_not_a_number(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        poison_at(patch, {5})
        poisoned = run(tmp_path, "poisoned")
    found = find_newest_checkpoint(poisoned / "checkpoints")
    assert found is not None
    assert any(name.startswith("optimizer.") for name in found.manifest.tensors)
    assert all(
        bool(torch.isfinite(read_tensor(found, name)).all()) for name in found.manifest.tensors
    )


def test_what_counts_as_a_spike() -> None:
    watch = LossSpikeDetector(RollbackSection(window_steps=3, spike_nats=0.5))
    assert [watch.observe(loss, skipped=False) for loss in (3.0, 9.0, 2.0, 3.4)] == [None] * 4
    assert watch.observe(float("nan"), skipped=True) is None
    assert (
        watch.observe(4.0, skipped=False)
        == "the loss is 4, 0.6 above the median of the 3 previous steps"
    )
    assert watch.observe(float("nan"), skipped=False) is not None
    watch.record_rollback()
    assert watch.observe(100.0, skipped=False) is None
    assert LossSpikeDetector(None).observe(1e9, skipped=False) is None
