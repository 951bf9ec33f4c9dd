"""Training loop in one process, on a short text."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoint.disk import Disk
from shardwright.checkpoint.run_folder import RunFolder
from shardwright.checkpoint.storage_path import parse_storage_path
from shardwright.config import Recipe
from shardwright.config.training import EvaluationSection
from shardwright.errors import CheckpointError, Preempted, SaveFailed
from shardwright.inference.model_source import open_model_source
from shardwright.launch.rank_outcome import LAUNCHER_VARIABLE
from shardwright.telemetry.event_log import (
    EVENTS_FILE_NAME,
    CheckpointEvent,
    EvaluationEvent,
    PreemptionEvent,
    StepEvent,
    WarningEvent,
    read_events,
    select_surviving,
)
from shardwright.training import checkpointing, step_policy
from shardwright.training.checkpointing import RunCheckpointer
from shardwright.training.loop import TrainingLoop
from shardwright.training.metrics.step_times import StepTimes
from shardwright.training.run import train
from tests.unit.training.finished import ALPHABET, CONFIG


def build_recipe(folder: Path, run: str = "run", **training: Any) -> Recipe:
    """Build a recipe of two steps with an evaluation after each."""
    (folder / "corpus.txt").write_text(ALPHABET * 20)
    data = {"sources": str(folder / "corpus.txt"), "cache_dir": str(folder / "cache")}
    return Recipe.model_validate(
        {
            "model": {"config": CONFIG},
            "tokenizer": {"kind": "character"},
            "data": data | {"validation_split": "tail", "validation_fraction": 0.2},
            "precision": "fp32",
            "training": {
                "sequence_length": 8,
                "micro_batch_size": 2,
                "max_steps": 2,
                "learning_rate": 1e-3,
            }
            | training,
            "evaluation": {"every_steps": 1},
            "run": {"dir": str(folder / run), "device": "cpu"},
        }
    )


def test_step_time_includes_the_work_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimizer kernels may still run when the host continues; reading the marks waits for them."""
    lag_seconds = 0.3
    read_marks = StepTimes.seconds

    def wait(times: StepTimes) -> dict[str, float]:
        time.sleep(lag_seconds)
        return read_marks(times)

    monkeypatch.setattr(StepTimes, "seconds", wait)
    train(build_recipe(tmp_path))
    steps = read_events(tmp_path / "run").filter_by_type(StepEvent)
    assert [step.step for step in steps] == [1, 2]
    for step in steps:
        assert step.step_seconds >= lag_seconds
        assert step.tokens_per_second <= step.tokens / lag_seconds


def test_a_rank_saves_and_ends_if_its_launcher_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAUNCHER_VARIABLE, str(os.getppid()))
    parents = iter([os.getppid()])
    monkeypatch.setattr(os, "getppid", lambda: next(parents, 1))
    with pytest.raises(Preempted, match="saved at step 1 of 2"):
        train(build_recipe(tmp_path))
    (stopped,) = read_events(tmp_path / "run").filter_by_type(PreemptionEvent)
    assert stopped.step == 1


def test_a_rank_behind_a_wrapper_of_its_launcher_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parent is a shell or a profiler."""
    monkeypatch.setenv(LAUNCHER_VARIABLE, str(os.getpid()))
    train(build_recipe(tmp_path))
    assert not read_events(tmp_path / "run").filter_by_type(PreemptionEvent)


def test_an_evaluation_that_a_stop_interrupted_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a stop during the evaluation of step 1, the resumed run starts with that evaluation.

    Both curves equal those of an uninterrupted run.
    """
    train(build_recipe(tmp_path, "whole"))
    evaluate = step_policy.evaluate

    def stop_and_evaluate(*arguments: Any, is_last: bool) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*arguments, is_last=is_last)

    with monkeypatch.context() as patched:
        patched.setattr(step_policy, "evaluate", stop_and_evaluate)
        with pytest.raises(Preempted, match="saved at step 1 of 2"):
            train(build_recipe(tmp_path))
    assert read_events(tmp_path / "run").filter_by_type(EvaluationEvent) == []
    train(build_recipe(tmp_path), resume=True)
    curves = [
        [
            (event.step, event.loss)
            for event in select_surviving(read_events(tmp_path / run))
            if isinstance(event, EvaluationEvent)
        ]
        for run in ("whole", "run")
    ]
    assert [step for step, _ in curves[0]] == [1, 2]
    assert curves[0] == curves[1]


def test_resume_if_started_starts_or_resumes(tmp_path: Path) -> None:
    first = train(build_recipe(tmp_path), resume_if_started=True)
    assert first is not None
    assert first["steps"] == 2
    train(build_recipe(tmp_path, max_steps=3), resume_if_started=True)
    events = read_events(tmp_path / "run")
    assert [step.step for step in events.filter_by_type(StepEvent)] == [1, 2, 3]
    assert not any("starts again" in event.message for event in events.filter_by_type(WarningEvent))


@pytest.mark.parametrize("is_emptied", [False, True])
@pytest.mark.parametrize("option", ["resume", "resume_if_started"])
def test_a_run_does_not_start_again_after_its_checkpoints_vanished(
    tmp_path: Path, option: str, is_emptied: bool
) -> None:
    train(build_recipe(tmp_path))
    folder = tmp_path / "run"
    (folder / "checkpoints").rename(tmp_path / "elsewhere")
    if is_emptied:
        (folder / "checkpoints").mkdir()
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    options: dict[str, Any] = {option: True}
    message = r"checkpoint\.dir: it has no checkpoint, and the run has saved .*/step-00000002 at "
    with pytest.raises(CheckpointError, match=message + r"step 2 .*start again at step 0, remove"):
        train(build_recipe(tmp_path, max_steps=3), **options)
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before
    if is_emptied:
        (folder / "checkpoints").rmdir()
    (tmp_path / "elsewhere").rename(folder / "checkpoints")
    train(build_recipe(tmp_path, max_steps=3), **options)
    steps = [event.step for event in read_events(folder) if isinstance(event, StepEvent)]
    assert steps == [1, 2, 3]


@pytest.mark.parametrize("option", ["resume", "resume_if_started"])
def test_a_run_that_saved_nothing_starts_again(tmp_path: Path, option: str) -> None:
    train(build_recipe(tmp_path))
    folder = tmp_path / "run"
    shutil.rmtree(folder / "checkpoints")
    lines = (folder / EVENTS_FILE_NAME).read_text().splitlines(keepends=True)
    unsaved = [line for line in lines if '"kind": "checkpoint"' not in line]
    assert len(unsaved) < len(lines)
    (folder / EVENTS_FILE_NAME).write_text("".join(unsaved))
    summary = train(build_recipe(tmp_path), **{option: True})  # type: ignore[arg-type]
    assert summary is not None
    assert summary["steps"] == 2
    warnings = read_events(folder).filter_by_type(WarningEvent)
    assert any("starts again at step 0" in event.message for event in warnings)


def test_allowed_changes_on_resume_are_reported(tmp_path: Path) -> None:
    train(build_recipe(tmp_path))
    train(build_recipe(tmp_path, max_steps=3), resume=True)
    messages = [
        event.message for event in read_events(tmp_path / "run").filter_by_type(WarningEvent)
    ]
    assert messages == ["changed since the checkpoint: training.max_steps: saved 2, now 3"]


def test_drift_is_refused_by_field_and_allowed_by_name(tmp_path: Path) -> None:
    train(build_recipe(tmp_path))
    changed = build_recipe(
        tmp_path, max_steps=3, learning_rate=2e-3, micro_batch_size=1
    ).model_copy(update={"seed": 5})
    rate = "training.learning_rate: saved 0.001, now 0.002"
    seed = "seed: saved 0, now 5"
    batch = "global_batch_size: saved 2, now 1 (cannot be allowed"
    with pytest.raises(CheckpointError) as refused:
        train(changed, resume=True, allow_drift=["seed", "global_batch_size"])
    assert rate in str(refused.value)
    assert batch in str(refused.value)
    assert seed not in str(refused.value)
    assert "resume anyway" not in str(refused.value)
    assert "to keep 2, change training.micro_batch_size" in str(refused.value)
    with pytest.raises(CheckpointError, match="or resume anyway"):
        train(build_recipe(tmp_path, max_steps=3, learning_rate=2e-3), resume=True)
    changed = build_recipe(tmp_path, max_steps=3, learning_rate=2e-3).model_copy(update={"seed": 5})
    train(changed, resume=True, allow_drift=["seed", "training"])
    assert any(
        f"{seed}; {rate}" in event.message
        for event in read_events(tmp_path / "run").filter_by_type(WarningEvent)
    )
    values = json.loads(
        (tmp_path / "run" / "checkpoints" / "step-00000003" / "values.json").read_text()
    )
    assert values["drift"] == [
        {"step": 2, "field": "seed", "saved": 0, "current": 5},
        {"step": 2, "field": "training.learning_rate", "saved": 0.001, "current": 0.002},
    ]


class FullDisk(Disk):
    """Disk that is full at selected saves."""

    full = False

    def write(self, descriptor: int, data: memoryview) -> None:
        if FullDisk.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(descriptor, data)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failed_save_is_reported_and_training_continues_unless_it_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    monkeypatch.setattr(checkpointing, "get_disk", lambda _place: FullDisk())
    recipe = build_recipe(tmp_path, max_steps=3)
    section = recipe.checkpoint.model_copy(
        update={"every_steps": 1, "asynchronous": asynchronous, "keep_best": False}
    )
    recipe = recipe.model_copy(update={"checkpoint": section})
    save = RunCheckpointer.save

    def save_and_wait(saver: RunCheckpointer, **options: Any) -> None:
        FullDisk.full = saver.state.step == full_at
        save(saver, **options)
        saver._finish_pending_save()

    monkeypatch.setattr(RunCheckpointer, "save", save_and_wait)
    full_at = 2
    train(recipe)
    events = read_events(tmp_path / "run")
    assert [event.step for event in events.filter_by_type(CheckpointEvent)] == [1, 3]
    (warning,) = events.filter_by_type(WarningEvent)
    assert "No space left" in warning.message
    for event in events.filter_by_type(CheckpointEvent):
        assert event.stall_seconds is not None
        assert 0 < event.stall_seconds <= event.seconds

    full_at = 3
    with pytest.raises(SaveFailed, match=r"No space left.*--resume then repeats"):
        train(
            recipe.model_copy(
                update={"run": recipe.run.model_copy(update={"dir": str(tmp_path / "other")})}
            )
        )
    assert [
        event.step for event in read_events(tmp_path / "other").filter_by_type(CheckpointEvent)
    ] == [1, 2]


def test_checkpoints_may_have_their_own_location(tmp_path: Path) -> None:
    url = "memory://bucket/elsewhere"
    recipe = build_recipe(tmp_path)
    recipe = recipe.model_copy(
        update={"checkpoint": recipe.checkpoint.model_copy(update={"dir": url})}
    )
    train(recipe)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert RunFolder.open_existing(tmp_path / "run").checkpoints == parse_storage_path(url)
    longer = recipe.model_copy(
        update={"training": recipe.training.model_copy(update={"max_steps": 3})}
    )
    train(longer, resume=True)
    assert [
        event.step
        for event in select_surviving(read_events(tmp_path / "run"))
        if isinstance(event, StepEvent)
    ] == [1, 2, 3]
    assert open_model_source(tmp_path / "run").step == 3


def test_a_reduction_dtype_without_effect_is_reported(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path, max_steps=1)
    train(
        recipe.model_copy(
            update={"precision": recipe.precision.model_copy(update={"reduce_dtype": "bf16"})}
        )
    )
    messages = (tmp_path / "run" / "log.txt").read_text()
    assert messages.count("precision.reduce_dtype has no effect under") == 1
    assert "in their own dtype, float32" in messages


def read_numbers(folder: Path) -> list[tuple[Any, ...]]:
    """Return the numbers of a run that no clock decides, in the order of its events."""
    return [
        (event.step, event.loss, event.gradient_norm, event.samples_seen, event.supervised_tokens)
        if isinstance(event, StepEvent)
        else (event.kind, getattr(event, "step", None), getattr(event, "loss", None))
        for event in read_events(folder)
        if isinstance(event, StepEvent | EvaluationEvent)  # saves end in the background
    ]


def test_events_that_are_written_one_step_late_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA the times of a step are known when the next one is launched."""
    sections = {"max_steps": 7}
    recipes = [build_recipe(tmp_path, run, **sections) for run in ("now", "late")]
    recipes = [
        recipe.model_copy(
            update={
                "evaluation": recipe.evaluation.model_copy(update={"every_steps": 3}),
                "checkpoint": recipe.checkpoint.model_copy(update={"every_steps": 5}),
            }
        )
        for recipe in recipes
    ]
    train(recipes[0])
    finished: list[tuple[int, int]] = []
    may_act = step_policy.StepPolicy.may_act
    finish = TrainingLoop._finish_step

    def record(loop: TrainingLoop, result: Any) -> bool:
        finished.append((loop.state.step, result.step))
        return finish(loop, result)

    monkeypatch.setattr(TrainingLoop, "_finish_step", record)
    monkeypatch.setattr(
        TrainingLoop,
        "_may_finish_later",
        lambda loop, result: not may_act(loop.policy, result.step, result.update),
    )
    train(recipes[1])
    # Steps 3 and 6 are evaluated, step 5 is saved, step 7 is the last one.
    assert finished == [(2, 1), (3, 2), (3, 3), (5, 4), (5, 5), (6, 6), (7, 7)]
    assert read_numbers(tmp_path / "late") == read_numbers(tmp_path / "now")


def test_a_stop_ends_a_run_with_late_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingLoop, "_may_finish_later", lambda _loop, result: result.step < 20)
    run_step = TrainingLoop._run_step

    def stop_in_step_4(loop: TrainingLoop) -> Any:
        if loop.state.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return run_step(loop)

    monkeypatch.setattr(TrainingLoop, "_run_step", stop_in_step_4)
    recipe = build_recipe(tmp_path, max_steps=20)
    with pytest.raises(Preempted, match="saved at step 4 of 20"):
        train(recipe.model_copy(update={"evaluation": EvaluationSection()}))
    steps = read_events(tmp_path / "run").filter_by_type(StepEvent)
    assert [step.step for step in steps] == [1, 2, 3, 4]


@pytest.mark.parametrize("every_steps", [None, 1])
def test_evaluations_without_validation_data_are_warned_of(
    tmp_path: Path, every_steps: int | None
) -> None:
    recipe = build_recipe(tmp_path)
    train(
        recipe.model_copy(
            update={
                "data": recipe.data.model_copy(update={"validation_fraction": 0.0}),
                "evaluation": EvaluationSection(every_steps=every_steps),
            }
        )
    )
    events = read_events(tmp_path / "run")
    warnings = [event.message for event in events if isinstance(event, WarningEvent)]
    expected = (
        "evaluation.every_steps: 1 has no effect, because there is no validation data; set "
        "data.validation or data.validation_fraction"
    )
    assert warnings == ([] if every_steps is None else [expected])
