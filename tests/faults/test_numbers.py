"""Faults 8 and 9: a gradient that is not a number on one rank, and a loss that spikes: the same
decision on every rank.

The oracle is a run that was given the same skips by hand.
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
from tests.faults.conftest import BATCH, STEPS, Run, final_state, samples_of

pytestmark = pytest.mark.timeout(1800)


def at(rank: int, step: int, place: str, **more: Any) -> dict[str, Any]:
    return {"rank": rank, "step": step, "place": place, "signals": []} | more


@pytest.mark.long
@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2,zero_stage=3", "tp=2", "pp=2"])
def test_a_gradient_that_is_not_a_number_is_skipped_by_every_rank(
    run: Run, tmp_path: Path, layout: str
) -> None:
    """Bit-equal, moments too, to the run in which every rank was told to pass over the step."""
    words = [
        "--layout",
        layout,
        *([] if layout != "pp=2" else ["--set", "training.gradient_accumulation_steps=2"]),
    ]
    done = run(*words, faults=[at(1, 5, "poison")])
    assert done.returncode == ExitCode.DONE, done.stderr
    (tmp_path / "run").rename(tmp_path / "poisoned")
    assert [
        event.step for event in read_events(tmp_path / "poisoned").filter_by_type(SkippedStepEvent)
    ] == [6]
    done = run(*words, faults=[at(rank, 5, "pass over") for rank in range(2)])
    assert done.returncode == ExitCode.DONE, done.stderr
    ours = final_state(tmp_path / "poisoned")
    theirs = final_state(tmp_path / "run")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in ours.values())
    assert any(name.startswith("optimizer.") for name in ours)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.long
def test_a_loss_that_spikes_takes_the_run_back_and_past_the_data(run: Run, tmp_path: Path) -> None:
    words = ["--set", "elastic.rollback={window_steps: 4, spike_nats: 1.0}"]
    done = run(*words, faults=[at(rank, 7, "spike") for rank in range(2)])
    assert done.returncode == ExitCode.DONE, done.stderr
    (tmp_path / "run").rename(tmp_path / "spiked")
    events = read_events(tmp_path / "spiked")
    (back,) = events.filter_by_type(RollbackEvent)
    assert (back.step, back.from_step, back.first_sample, back.num_samples) == (
        6,
        8,
        6 * BATCH,
        2 * BATCH,
    )
    assert "above the median" in back.reason
    assert [step.samples_seen for step in select_surviving_steps(events)] == [
        BATCH * (step + (2 if step > 6 else 0)) for step in range(1, STEPS + 1)
    ]
    used = [index for step in range(1, STEPS + 1) for index in samples_of(tmp_path / "marks", step)]
    assert sorted(used) == [*range(6 * BATCH), *range(8 * BATCH, (STEPS + 2) * BATCH)]

    done = run(faults=[at(rank, 6, "jump", count=2) for rank in range(2)])
    assert done.returncode == ExitCode.DONE, done.stderr
    ours = final_state(tmp_path / "spiked")
    theirs = final_state(tmp_path / "run")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.long
def test_without_finite_gradients_the_run_goes_back_so_often_and_then_says_so(
    run: Run, tmp_path: Path
) -> None:
    words = [
        "--set",
        "elastic.rollback={max_rollbacks: 1}",
        "--set",
        "training.max_skipped_steps=1",
    ]
    # After the rollback the same steps come again, with other data.
    faults = [at(0, 5, "poison"), at(0, 6, "poison")]
    done = run(*words, faults=faults)
    assert done.returncode == ExitCode.DONE, done.stderr
    (back,) = read_events(tmp_path / "run").filter_by_type(RollbackEvent)
    assert "2 consecutive steps up to step 7" in back.reason
    assert (back.step, back.from_step) == (6, 7)
