"""Faults 1, 5 and 9: ranks that die in the forward pass, a collective, the optimizer and a save,
and a bit that flips.

The run starts its ranks again, and ends as one that was left alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwright.errors import ExitCode
from shardwright.telemetry.event_log import ResumeEvent, RunStartedEvent, WarningEvent, read_events
from tests.faults.conftest import BATCH, STEPS, Run, assert_same_end, samples_of

pytestmark = pytest.mark.timeout(1800)
"""Some start ranks six times over, which a busy machine takes minutes for."""


def death(rank: int, step: int, place: str) -> dict[str, Any]:
    return {"rank": rank, "step": step, "place": place, "signals": ["SIGKILL"]}


@pytest.mark.long
def test_a_run_whose_ranks_die_everywhere_ends_with_the_same_bits(
    run: Run, untroubled: Path, tmp_path: Path
) -> None:
    faults = [
        death(1, 5, "forward"),  # the save of step 2 is done: that of step 4 has waited for it
        death(0, 6, "collective"),
        death(1, 7, "optimizer"),
        death(
            1, 8, "save"
        ),  # of step 8, in the background, while step 9 is computed or waits for it
        death(
            0, 10, "publish"
        ),  # after the checkpoint of step 10 has its name, before `latest` names it
    ]
    done = run("--set", "elastic.max_restarts=5", faults=faults)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert len(
        [mark for mark in (tmp_path / "marks").iterdir() if not mark.name.startswith("ledger-")]
    ) == len(faults)
    assert_same_end(tmp_path / "run", untroubled, tmp_path / "marks")
    events = read_events(tmp_path / "run")
    assert (
        len(events.filter_by_type(RunStartedEvent))
        == len(events.filter_by_type(ResumeEvent)) + 1
        == len(faults) + 1
    )
    restarts = [
        event.message
        for event in events.filter_by_type(WarningEvent)
        if event.message.startswith("restart ")
    ]
    assert [message.partition(":")[0] for message in restarts] == [
        f"restart {number} of at most 5, 2 ranks" for number in range(1, 6)
    ]
    assert all("was killed by SIGKILL" in message for message in restarts)


@pytest.mark.long
def test_restarts_are_bounded_and_the_cause_is_told(run: Run, tmp_path: Path) -> None:
    done = run(
        "--set", "elastic.max_restarts=1", faults=[death(1, 1, "forward"), death(0, 2, "forward")]
    )
    assert done.returncode == ExitCode.RUN_FAILED
    assert "rank 0 was killed by SIGKILL" in done.stderr
    assert len(read_events(tmp_path / "run").filter_by_type(RunStartedEvent)) == 2


def test_what_stays_lost_is_left_behind(run: Run, untroubled: Path, tmp_path: Path) -> None:
    """The second rank dies before anything new is saved: the next generation is one rank, with the
    same global batch.
    """
    words = ["--set", "elastic.max_restarts=1", "--set", "elastic.min_ranks=1"]
    done = run(*words, "--set", "training.gradient_accumulation_steps=null", "--set", "training.micro_batch_size=2",
               faults=[death(1, 1, "forward")])  # fmt: skip
    assert done.returncode == ExitCode.DONE, done.stderr
    starts = read_events(tmp_path / "run").filter_by_type(RunStartedEvent)
    assert [event.world_size for event in starts] == [2, 1]
    used = [index for step in range(1, STEPS + 1) for index in samples_of(tmp_path / "marks", step)]
    assert sorted(used) == list(range(BATCH * STEPS))
    assert {event.global_batch_tokens for event in starts} == {64}


def test_a_weight_that_flips_on_one_replica_is_found_before_it_is_saved(
    run: Run, tmp_path: Path
) -> None:
    """The run goes back to the checkpoint before, and ends as one in which nothing had flipped."""
    words = ["--layout", "dp_replicate=2", "--set", "run.replica_check_every_steps=3"]
    done = run(
        *words,
        "--set",
        "elastic.max_restarts=1",
        faults=[{"rank": 1, "step": 5, "place": "flip", "signals": []}],
    )
    assert done.returncode == ExitCode.DONE, done.stderr
    (restart,) = [
        event.message
        for event in read_events(tmp_path / "run").filter_by_type(WarningEvent)
        if event.message.startswith("restart ")
    ]
    assert "step 6: 1 of" in restart
    assert [event.step for event in read_events(tmp_path / "run").filter_by_type(ResumeEvent)] == [
        4
    ]
    (tmp_path / "run").rename(tmp_path / "flipped")
    done = run(*words)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert_same_end(tmp_path / "flipped", tmp_path / "run")
