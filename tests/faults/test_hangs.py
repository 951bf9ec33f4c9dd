"""Fault 2: the watchdog names a rank that is stopped, one whose interpreter lock is held, one that
sleeps, and one that skips a collective.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardwright.errors import ExitCode
from shardwright.telemetry.event_log import RestartEvent, ResumeEvent, read_events
from tests.faults.conftest import Run, assert_same_end

pytestmark = pytest.mark.timeout(1800)

QUICK = [
    "--set",
    "watchdog.floor_seconds=15",
    "--set",
    "watchdog.factor=3",
    "--set",
    "checkpoint.asynchronous=false",
]
"""The steps of these runs take milliseconds; on a busy machine some take seconds. The save of step
6 is complete before step 7.
"""
HANGS: dict[str, dict[str, Any]] = {
    "stopped by a signal (SIGSTOP)": {"place": "collective", "signals": ["SIGSTOP"]},
    "not running Python": {"place": "hold"},
    "has been in step 7": {"place": "sleep"},
    "rank 1 skipped all_reduce": {"place": "skip"},
}


@pytest.mark.long
@pytest.mark.parametrize("cause", HANGS)
def test_a_rank_that_hangs_is_named_with_the_collective(
    run: Run, undisturbed: Path, tmp_path: Path, cause: str
) -> None:
    """The generation ends, the stacks of all ranks are in a file, and the next generation ends with
    the bits of the run without faults.
    """
    fault = {"rank": 1, "step": 7} | HANGS[cause]
    done = run("--set", "elastic.max_restarts=1", *QUICK, faults=[fault])
    assert done.returncode == ExitCode.DONE, done.stderr
    (restart,) = [
        event.reason for event in read_events(tmp_path / "run").filter_by_type(RestartEvent)
    ]
    assert cause in restart
    assert re.search(
        r"rank 1 (is missing from|skipped) (all_reduce|all_gather|reduce_scatter) #\d+ ", restart
    ), restart
    assert [event.step for event in read_events(tmp_path / "run").filter_by_type(ResumeEvent)] == [
        6
    ]
    if fault["place"] != "skip":  # gloo itself may detect mismatched collectives
        (report,) = (tmp_path / "run" / "hangs").iterdir()
        text = report.read_text()
        for rank in (0, 1):
            _, _, stack = text.partition(f"\nrank {rank}, process ")
            assert re.search(r'File ".*", line \d+ in \w+', stack.partition("\nrank ")[0]), text
    assert_same_end(tmp_path / "run", undisturbed, tmp_path / "marks")
