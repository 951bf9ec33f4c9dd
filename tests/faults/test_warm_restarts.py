"""Warm restarts: survivors keep their processes, a spare takes the lost rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.errors import ExitCode
from shardwright.telemetry.event_log import RestartEvent, read_events
from tests.faults.conftest import Run, assert_same_end
from tests.faults.test_deaths import make_death

WARM = ("--set", "elastic.warm_restarts=true", "--set", "elastic.max_restarts=6")


def read_restarts(run: Path) -> list[RestartEvent]:
    return read_events(run).filter_by_type(RestartEvent)


def test_survivors_stay_and_the_result_is_the_same(
    run: Run, undisturbed: Path, tmp_path: Path
) -> None:
    """The first restart takes rank 1 from the spare; in the second rank 0 is lost."""
    faults = [make_death(1, 5, "collective"), make_death(0, 8, "save")]
    done = run(*WARM, faults=faults)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert_same_end(tmp_path / "run", undisturbed, tmp_path / "marks")
    restarts = read_restarts(tmp_path / "run")
    assert [restart.surviving_ranks for restart in restarts] == [(0,), (1,)]
    assert all(restart.is_warm and not restart.stuck_ranks for restart in restarts)
    assert all("was killed by SIGKILL" in restart.reason for restart in restarts)


@pytest.mark.long
def test_a_stuck_survivor_is_replaced(run: Run, undisturbed: Path, tmp_path: Path) -> None:
    """Rank 0 sleeps in its step when rank 1 dies, so it cannot leave the generation in time."""
    sleep = {"rank": 0, "step": 5, "place": "sleep", "signals": list[str]()}
    faults = [make_death(1, 5, "forward"), sleep]
    done = run(*WARM, faults=faults)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert_same_end(tmp_path / "run", undisturbed, tmp_path / "marks")
    (restart,) = read_restarts(tmp_path / "run")
    assert (restart.surviving_ranks, restart.stuck_ranks) == ((), (0,))
    assert "rank 1 was killed by SIGKILL" in restart.reason
    assert "stuck and are replaced: rank 0. No process stays (cold restart)" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        "dp_shard=4,zero_stage=3",
        "dp_replicate=2,dp_shard=2",
        "pp=2,dp_shard=2",
        "cp=2,dp_replicate=2",
    ],
)
def test_survivors_of_four_ranks_leave_every_kind_of_group(
    run: Run, tmp_path: Path, layout: str
) -> None:
    """Ranks that wait for other survivors, not for the lost rank, leave the generation too."""
    words = ["--layout", layout, "--set", "training.gradient_accumulation_steps=null"]
    words += ["--set", "training.micro_batch_size=1"]
    done = run(*words, ranks=4)
    assert done.returncode == ExitCode.DONE, done.stderr
    (tmp_path / "run").rename(tmp_path / "undisturbed")
    faults = [make_death(2, 4, "forward"), make_death(0, 7, "collective")]
    done = run(*words, *WARM, faults=faults, ranks=4)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert_same_end(tmp_path / "run", tmp_path / "undisturbed")
    restarts = read_restarts(tmp_path / "run")
    assert [restart.surviving_ranks for restart in restarts] == [(0, 1, 3), (1, 2, 3)]
    assert not any(restart.stuck_ranks for restart in restarts)
