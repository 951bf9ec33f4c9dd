"""The training loop on the test device: one wait of the host per step, events one step late, and
memory of rows of changing lengths.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.telemetry.event_log import StepEvent, read_events
from shardwright.training.loop import TrainingLoop
from shardwright.training.run import train
from tests.hostcuda import device as test_device
from tests.unit.training.test_precision_choice import build_recipe
from tests.unit.training.test_run_checks import build_recipe as build_uneven_recipe


def test_the_loop_waits_once_per_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[Any] = Counter()
    finished: list[tuple[int, int]] = []
    logging = ExitStack()
    run_step = TrainingLoop._run_step
    finish_step = TrainingLoop._finish_step

    def run_and_count(loop: TrainingLoop) -> Any:
        if loop.state.step == 3:
            log = logging.enter_context(test_device.log_synchronisations())
            logging.callback(lambda: counts.update(log))
        elif loop.state.step == 6:
            logging.close()
        return run_step(loop)

    def record_finish(loop: TrainingLoop, result: Any) -> bool:
        finished.append((loop.state.step, result.step))
        return finish_step(loop, result)

    monkeypatch.setattr(TrainingLoop, "_run_step", run_and_count)
    monkeypatch.setattr(TrainingLoop, "_finish_step", record_finish)
    recipe = build_recipe(tmp_path, "fp32", max_steps=8)
    recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"device": "cuda"})})
    train(recipe)
    assert sum(counts.values()) == 3, counts
    assert finished == [*((step + 1, step) for step in range(1, 8)), (8, 8)]
    steps = read_events(tmp_path / "run").filter_by_type(StepEvent)
    assert [step.step for step in steps] == list(range(1, 9))
    assert all(step.step_seconds > 0 for step in steps)
    assert not test_device.list_violations()


def test_rows_of_changing_lengths_leave_no_memory_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step after the first one starts from the same bytes on the device."""
    allocated: list[int] = []
    run_step = TrainingLoop._run_step

    def count_and_run(loop: TrainingLoop) -> Any:
        allocated.append(torch.cuda.memory_allocated())
        return run_step(loop)

    monkeypatch.setattr(TrainingLoop, "_run_step", count_and_run)
    training = {"global_batch_size": 1, "micro_batch_size": 1, "max_steps": 50}
    recipe = build_uneven_recipe(tmp_path, training=training)
    train(recipe.model_copy(update={"run": recipe.run.model_copy(update={"device": "cuda"})}))
    steps = read_events(tmp_path / "run").filter_by_type(StepEvent)
    assert {step.tokens for step in steps} == {16, 24, 32}
    assert len(set(allocated[1:])) == 1, allocated
