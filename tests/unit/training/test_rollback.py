"""Automatic rollback in one process: after loss spikes and repeated non-finite gradients."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.checkpoint.tensor_loading import find_newest_checkpoint, read_tensor
from shardwright.config.run import RollbackSection
from shardwright.errors import NonFiniteCheckpoint, NonFiniteError
from shardwright.inference.model_source import load_decoder, open_model_source
from shardwright.telemetry.event_log import (
    RollbackEvent,
    WarningEvent,
    read_events,
    select_surviving_steps,
)
from shardwright.training import loop
from shardwright.training.loop import TrainingLoop
from shardwright.training.rollback import LossSpikeDetector
from shardwright.training.run import train
from tests.unit.training.test_loop import build_recipe

BATCH = 2
WEIGHT = "model.norm.weight"


def train_run(
    folder: Path,
    name: str,
    rollback: dict[str, Any] | None = None,
    *,
    resume: bool = False,
    keep_last: int = 2,
    allow_non_finite: bool = False,
    **training: Any,
) -> Path:
    """Train eight steps with a checkpoint at every second one; return the run folder."""
    recipe = build_recipe(folder, name, max_steps=8, **training)
    section = recipe.checkpoint.model_copy(
        update={
            "every_steps": 2,
            "keep_last": keep_last,
            "keep_best": False,
            "asynchronous": False,
            "allow_non_finite": allow_non_finite,
        }
    )
    elastic = recipe.elastic.model_copy(
        update={"rollback": None if rollback is None else RollbackSection(**rollback)}
    )
    evaluation = recipe.evaluation.model_copy(update={"every_steps": None})
    train(
        recipe.model_copy(
            update={"checkpoint": section, "elastic": elastic, "evaluation": evaluation}
        ),
        resume=resume,
    )
    return folder / name


def add_spikes(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Multiply the loss of these steps, in execution order, by 1000; gradients are unchanged."""
    step_numbers = iter(range(1, 100))
    original = loop.accumulate_gradients

    def accumulate(*arguments: Any, **options: Any) -> Any:
        loss = original(*arguments, **options)
        return replace(loss, loss_sum=loss.loss_sum * 1000) if next(step_numbers) in steps else loss

    monkeypatch.setattr(loop, "accumulate_gradients", accumulate)


def add_nan_gradients(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Set a gradient of these steps, in execution order, to NaN."""
    step_numbers = iter(range(1, 100))
    original = loop.update_parameters

    def update(model: Any, optimizer: Any, **options: Any) -> Any:
        if next(step_numbers) in steps:
            gradients = (gradient for gradient, _ in model.list_gradients())
            first = next(gradient for gradient in gradients if gradient is not None)
            first.view(-1)[0] = float("nan")
        return original(model, optimizer, **options)

    monkeypatch.setattr(loop, "update_parameters", update)


def add_infinite_weight(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Set a weight to infinity in the update of a step; later gradients are not finite."""
    step_numbers = iter(range(1, 100))
    original = loop.update_parameters

    def update(model: Any, optimizer: Any, **options: Any) -> Any:
        result = original(model, optimizer, **options)
        if next(step_numbers) == step:
            dict(model.named_parameters())[WEIGHT].data.view(-1)[0] = float("inf")
        return result

    monkeypatch.setattr(loop, "update_parameters", update)


def skip_data(monkeypatch: pytest.MonkeyPatch, *, before_step: int, count: int) -> None:
    """Skip the data of `count` steps before `before_step`."""
    original: Callable[[TrainingLoop], Any] = TrainingLoop._run_step

    def step(training_loop: TrainingLoop) -> Any:
        if training_loop.state.step == before_step:
            training_loop.state.skipped_data_steps = count
        return original(training_loop)

    monkeypatch.setattr(TrainingLoop, "_run_step", step)


def assert_same_weights(one: Path, other: Path) -> None:
    checkpoint = find_newest_checkpoint(one / "checkpoints")
    other_checkpoint = find_newest_checkpoint(other / "checkpoints")
    assert checkpoint is not None
    assert other_checkpoint is not None
    assert checkpoint.step == other_checkpoint.step == 8
    assert all(
        torch.equal(read_tensor(checkpoint, name), read_tensor(other_checkpoint, name))
        for name in checkpoint.manifest.tensors
    )


def test_a_spike_causes_a_rollback_that_skips_the_data(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        add_spikes(patch, {6})
        spiked = train_run(tmp_path, "spiked", {"window_steps": 3})
    events = read_events(spiked)
    (rollback_event,) = events.filter_by_type(RollbackEvent)
    assert (
        rollback_event.step,
        rollback_event.from_step,
        rollback_event.first_sample,
        rollback_event.num_samples,
    ) == (
        4,
        6,
        4 * BATCH,
        2 * BATCH,
    )
    seen = [(step.step, step.samples_seen // BATCH) for step in select_surviving_steps(events)]
    assert seen == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 7), (6, 8), (7, 9), (8, 10)]
    with pytest.MonkeyPatch.context() as patch:
        skip_data(patch, before_step=4, count=2)
        assert_same_weights(spiked, train_run(tmp_path, "by-hand"))


def test_at_least_steps_before_selects_an_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_spikes(monkeypatch, {6})
    (rollback_event,) = read_events(
        train_run(tmp_path, "run", {"window_steps": 3, "at_least_steps_before": 3})
    ).filter_by_type(RollbackEvent)
    assert (rollback_event.step, rollback_event.num_samples) == (2, 4 * BATCH)


def test_rollbacks_are_limited_and_reaching_the_limit_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_spikes(monkeypatch, {6, 10})
    events = read_events(train_run(tmp_path, "run", {"window_steps": 3, "max_rollbacks": 1}))
    assert len(events.filter_by_type(RollbackEvent)) == 1
    assert any(
        "no rollbacks are left (max_rollbacks is 1), so training continues" in event.message
        for event in events.filter_by_type(WarningEvent)
    )


def test_too_many_steps_without_finite_gradients_cause_a_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_nan_gradients(monkeypatch, {5, 6})
    with pytest.raises(NonFiniteError):
        train_run(tmp_path, "without", max_skipped_steps=1)
    add_nan_gradients(monkeypatch, {5, 6})
    (rollback_event,) = read_events(
        train_run(tmp_path, "with", {}, max_skipped_steps=1)
    ).filter_by_type(RollbackEvent)
    assert (rollback_event.step, rollback_event.from_step) == (4, 6)
    assert "2 consecutive steps up to step 6" in rollback_event.reason


def test_a_state_that_is_not_finite_is_not_continued(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A rollback reads an older checkpoint; a resume and a reader of the model fail."""
    problem = rf"step-0000000\d: NaN or infinity in model\.{WEIGHT}"
    with pytest.MonkeyPatch.context() as patch:
        add_infinite_weight(patch, 4)
        folder = train_run(tmp_path, "rolled-back", {}, keep_last=1, max_skipped_steps=2)
    events = read_events(folder)
    (rollback_event,) = events.filter_by_type(RollbackEvent)
    assert (rollback_event.step, rollback_event.from_step) == (2, 7)
    warnings = [event.message for event in events.filter_by_type(WarningEvent)]
    assert [bool(re.search(f"{problem}$", message)) for message in warnings] == [True, True]
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == ["step-00000008"]
    with pytest.MonkeyPatch.context() as patch:
        add_infinite_weight(patch, 2)
        with pytest.raises(NonFiniteCheckpoint, match=problem):
            train_run(tmp_path, "all", {}, max_skipped_steps=2)
    with pytest.raises(NonFiniteCheckpoint, match=f"{problem}.*checkpoint.allow_non_finite: true"):
        train_run(tmp_path, "all", resume=True, max_skipped_steps=2)
    caplog.clear()
    with pytest.raises(NonFiniteError):
        train_run(tmp_path, "all", resume=True, allow_non_finite=True, max_skipped_steps=2)
    assert re.search(problem, caplog.text)
    source = open_model_source(tmp_path / "all")
    with pytest.raises(NonFiniteCheckpoint, match=f"{problem}.*--checkpoint"):
        load_decoder(source, device=torch.device("cpu"), dtype=torch.float32)


def test_a_nan_gradient_does_not_reach_the_moments(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        add_nan_gradients(patch, {5})
        poisoned = train_run(tmp_path, "poisoned")
    checkpoint = find_newest_checkpoint(poisoned / "checkpoints")
    assert checkpoint is not None
    assert any(name.startswith("optimizer.") for name in checkpoint.manifest.tensors)
    assert all(
        bool(torch.isfinite(read_tensor(checkpoint, name)).all())
        for name in checkpoint.manifest.tensors
    )


def test_a_loss_above_the_median_is_a_spike() -> None:
    detector = LossSpikeDetector(RollbackSection(window_steps=3, spike_nats=0.5))
    assert [detector.observe(loss, skipped=False) for loss in (3.0, 9.0, 2.0, 3.4)] == [None] * 4
    assert detector.observe(float("nan"), skipped=True) is None
    assert (
        detector.observe(4.0, skipped=False)
        == "the loss is 4, 0.6 above the median of the 3 previous steps"
    )
    assert detector.observe(float("nan"), skipped=False) is not None
    detector.record_rollback()
    assert detector.observe(100.0, skipped=False) is None
    assert LossSpikeDetector(None).observe(1e9, skipped=False) is None
