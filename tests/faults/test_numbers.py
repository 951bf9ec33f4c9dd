"""Faults 8 and 9: after a gradient that is not a number on one rank, and after a loss spike, every
rank makes the same decision.

The oracle is a run with the same skips made by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.errors import ExitCode
from shardwright.telemetry.event_log import (
    RollbackEvent,
    SkippedStepEvent,
    read_events,
    select_surviving_steps,
)
from tests.faults.conftest import BATCH, STEPS, Run, list_used_samples, read_final_state

pytestmark = pytest.mark.timeout(1800)


def make_fault(rank: int, step: int, place: str, **options: Any) -> dict[str, Any]:
    return {"rank": rank, "step": step, "place": place, "signals": []} | options


@pytest.mark.parametrize(
    "layout",
    [
        "dp_shard=2,zero_stage=3",
        *(
            pytest.param(layout, marks=pytest.mark.long)
            for layout in ("dp_replicate=2", "tp=2", "pp=2")
        ),
    ],
)
def test_a_gradient_that_is_not_a_number_is_skipped_by_every_rank(
    run: Run, tmp_path: Path, layout: str
) -> None:
    """Weights and moments are bit-equal to those of a run in which every rank skips the step."""
    words = [
        "--layout",
        layout,
        *([] if layout != "pp=2" else ["--set", "training.gradient_accumulation_steps=2"]),
    ]
    done = run(*words, faults=[make_fault(1, 5, "poison")])
    assert done.returncode == ExitCode.DONE, done.stderr
    (tmp_path / "run").rename(tmp_path / "poisoned")
    assert [
        event.step for event in read_events(tmp_path / "poisoned").filter_by_type(SkippedStepEvent)
    ] == [6]
    done = run(*words, faults=[make_fault(rank, 5, "pass over") for rank in range(2)])
    assert done.returncode == ExitCode.DONE, done.stderr
    tensors = read_final_state(tmp_path / "poisoned")
    expected = read_final_state(tmp_path / "run")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
    assert any(name.startswith("optimizer.") for name in tensors)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def test_after_a_loss_spike_the_run_rolls_back_and_skips_the_data(run: Run, tmp_path: Path) -> None:
    words = ["--set", "elastic.rollback={window_steps: 4, spike_nats: 1.0}"]
    done = run(*words, faults=[make_fault(rank, 7, "spike") for rank in range(2)])
    assert done.returncode == ExitCode.DONE, done.stderr
    (tmp_path / "run").rename(tmp_path / "spiked")
    events = read_events(tmp_path / "spiked")
    (rollback,) = events.filter_by_type(RollbackEvent)
    assert (rollback.step, rollback.from_step, rollback.first_sample, rollback.num_samples) == (
        6,
        8,
        6 * BATCH,
        2 * BATCH,
    )
    assert "above the median" in rollback.reason
    assert [step.samples_seen for step in select_surviving_steps(events)] == [
        BATCH * (step + (2 if step > 6 else 0)) for step in range(1, STEPS + 1)
    ]
    used = [
        index
        for step in range(1, STEPS + 1)
        for index in list_used_samples(tmp_path / "marks", step)
    ]
    assert sorted(used) == [*range(6 * BATCH), *range(8 * BATCH, (STEPS + 2) * BATCH)]

    done = run(faults=[make_fault(rank, 6, "jump", count=2) for rank in range(2)])
    assert done.returncode == ExitCode.DONE, done.stderr
    tensors = read_final_state(tmp_path / "spiked")
    expected = read_final_state(tmp_path / "run")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def test_without_finite_gradients_the_run_rolls_back_as_often_as_allowed(
    run: Run, tmp_path: Path
) -> None:
    words = [
        "--set",
        "elastic.rollback={max_rollbacks: 1}",
        "--set",
        "training.max_skipped_steps=1",
    ]
    # After the rollback the same steps come again, with other data.
    faults = [make_fault(0, 5, "poison"), make_fault(0, 6, "poison")]
    done = run(*words, faults=faults)
    assert done.returncode == ExitCode.DONE, done.stderr
    (rollback,) = read_events(tmp_path / "run").filter_by_type(RollbackEvent)
    assert "2 consecutive steps up to step 7" in rollback.reason
    assert (rollback.step, rollback.from_step) == (6, 7)
