"""Fault 7: after SIGTERM to one rank or all, twice, even in a save, there is one coordinated save
and exit code 4, and the next start resumes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from shardwright.errors import ExitCode
from shardwright.telemetry.event_log import (
    CheckpointEvent,
    PreemptionEvent,
    ResumeEvent,
    read_events,
)
from tests.faults.conftest import Run, assert_same_end

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize(
    ("ranks", "step", "place"),
    [
        ((1,), 4, "forward"),
        pytest.param((0,), 6, "save", marks=pytest.mark.long),
        pytest.param((0, 1), 5, "forward", marks=pytest.mark.long),
    ],
)
def test_a_preempted_run_saves_once_and_resumes(
    run: Run,
    undisturbed: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    ranks: tuple[int, ...],
    step: int,
    place: str,
) -> None:
    faults = [
        {"rank": rank, "step": step, "place": place, "signals": ["SIGTERM", "SIGTERM"]}
        for rank in ranks
    ]
    done = run(faults=faults)
    ended = time.time()
    assert done.returncode == ExitCode.PREEMPTED, done.stderr
    signalled = min(mark.stat().st_mtime for mark in (tmp_path / "marks").glob(f"*-{place}"))
    with capsys.disabled():
        sys.stdout.write(f"\nsaved and ended {ended - signalled:.1f} s after SIGTERM\n")
    events = read_events(tmp_path / "run")
    (preempted,) = events.filter_by_type(PreemptionEvent)
    assert preempted.step is not None
    assert step < preempted.step <= step + 2
    assert [event.step for event in events.filter_by_type(CheckpointEvent)].count(
        preempted.step
    ) == 1
    done = run("--resume", faults=faults)  # no new fault: its mark exists
    assert done.returncode == ExitCode.DONE, done.stderr
    assert [event.step for event in read_events(tmp_path / "run").filter_by_type(ResumeEvent)] == [
        preempted.step
    ]
    assert_same_end(tmp_path / "run", undisturbed)
