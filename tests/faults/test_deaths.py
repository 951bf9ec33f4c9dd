"""Faults 1, 5 and 9: ranks that die in the forward pass, a collective, the optimizer and a save,
and a bit that flips.

The run restarts its ranks and ends with the result of a run without faults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwright.errors import ExitCode
from shardwright.report.recorded_run import load_run
from shardwright.telemetry.event_log import (
    FailureEvent,
    RestartEvent,
    ResumeEvent,
    RunStartedEvent,
    read_events,
)
from shardwright.telemetry.sinks import describe_event
from tests.faults.conftest import BATCH, STEPS, Run, assert_same_end, list_used_samples

pytestmark = pytest.mark.timeout(1800)
"""Some tests start ranks six times, which takes minutes on a busy machine."""


def make_death(rank: int, step: int, place: str) -> dict[str, Any]:
    return {"rank": rank, "step": step, "place": place, "signals": ["SIGKILL"]}


@pytest.mark.long
@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
def test_deaths_at_every_place_leave_the_same_bits(
    run: Run, undisturbed: Path, tmp_path: Path, is_warm: bool
) -> None:
    faults = [
        make_death(1, 5, "forward"),  # the save of step 4 has waited for that of step 2
        make_death(0, 6, "collective"),
        make_death(1, 7, "optimizer"),
        # The save of step 8 runs in the background, while step 9 is computed or waits for it.
        make_death(1, 8, "save"),
        # After the checkpoint of step 10 is renamed, before `latest` points to it.
        make_death(0, 10, "publish"),
    ]
    words = ["--set", "elastic.max_restarts=5"]
    words += ["--set", f"elastic.warm_restarts={str(is_warm).lower()}"]
    done = run(*words, faults=faults)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert len(
        [mark for mark in (tmp_path / "marks").iterdir() if not mark.name.startswith("ledger-")]
    ) == len(faults)
    assert_same_end(tmp_path / "run", undisturbed, tmp_path / "marks")
    events = read_events(tmp_path / "run")
    assert (
        len(events.filter_by_type(RunStartedEvent))
        == len(events.filter_by_type(ResumeEvent)) + 1
        == len(faults) + 1
    )
    restarts = events.filter_by_type(RestartEvent)
    assert [describe_event(restart).partition(":")[0] for restart in restarts] == [
        f"restart {number} of at most 5, 2 ranks" for number in range(1, 6)
    ]
    assert all("was killed by SIGKILL" in restart.reason for restart in restarts)
    dead_ranks = [fault["rank"] for fault in faults]
    assert [restart.surviving_ranks for restart in restarts] == [
        (1 - rank,) if is_warm else () for rank in dead_ranks
    ]


@pytest.mark.parametrize(
    "is_warm", [False, pytest.param(True, marks=pytest.mark.long)], ids=["cold", "warm"]
)
def test_restarts_are_bounded_and_the_cause_is_reported(
    run: Run, tmp_path: Path, is_warm: bool
) -> None:
    done = run(
        "--set",
        "elastic.max_restarts=1",
        "--set",
        f"elastic.warm_restarts={str(is_warm).lower()}",
        faults=[make_death(1, 1, "forward"), make_death(0, 2, "forward")],
    )
    assert done.returncode == ExitCode.RUN_FAILED
    assert "rank 0 was killed by SIGKILL" in done.stderr
    report = load_run(tmp_path / "run")
    assert len(report.log.filter_by_type(RunStartedEvent)) == 2
    assert report.status == "failed"  # rank 0 could not log it
    cause = report.interruptions[-1]
    assert isinstance(cause, FailureEvent)
    assert cause.message.startswith("rank 0 was killed by SIGKILL")
    assert "--resume" not in cause.message
    events = report.log.events
    assert events[-1].elapsed_seconds >= events[-2].elapsed_seconds


def test_a_run_continues_without_a_lost_rank(run: Run, undisturbed: Path, tmp_path: Path) -> None:
    """The second rank dies before anything is saved; the next generation has one rank and the
    same global batch.
    """
    words = ["--set", "elastic.max_restarts=1", "--set", "elastic.min_ranks=1"]
    words += ["--set", "training.gradient_accumulation_steps=null"]
    words += ["--set", "training.micro_batch_size=2"]
    done = run(*words, faults=[make_death(1, 1, "forward")])
    assert done.returncode == ExitCode.DONE, done.stderr
    starts = read_events(tmp_path / "run").filter_by_type(RunStartedEvent)
    assert [event.world_size for event in starts] == [2, 1]
    used = [
        index
        for step in range(1, STEPS + 1)
        for index in list_used_samples(tmp_path / "marks", step)
    ]
    assert sorted(used) == list(range(BATCH * STEPS))
    assert {event.global_batch_tokens for event in starts} == {64}


def test_a_flipped_bit_on_one_replica_is_detected_before_it_is_saved(
    run: Run, tmp_path: Path
) -> None:
    """The run returns to the previous checkpoint and ends as one without the flipped bit."""
    words = ["--layout", "dp_replicate=2", "--set", "run.replica_check_every_steps=3"]
    done = run(
        *words,
        "--set",
        "elastic.max_restarts=1",
        faults=[{"rank": 1, "step": 5, "place": "flip", "signals": []}],
    )
    assert done.returncode == ExitCode.DONE, done.stderr
    (restart,) = read_events(tmp_path / "run").filter_by_type(RestartEvent)
    assert "step 6: 1 of" in restart.reason
    assert [event.step for event in read_events(tmp_path / "run").filter_by_type(ResumeEvent)] == [
        4
    ]
    (tmp_path / "run").rename(tmp_path / "flipped")
    done = run(*words)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert_same_end(tmp_path / "flipped", tmp_path / "run")
