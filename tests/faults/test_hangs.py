"""Fault 2: a rank that is stopped, one whose interpreter is held, one that sleeps, and one that
skips a collective are named.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardwright.errors import ExitCode
from shardwright.telemetry.event_log import ResumeEvent, WarningEvent, read_events
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
"""The steps of these runs take milliseconds; on a busy machine some take seconds. What step 6 saves
is there before step 7.
"""
HANGS: dict[str, dict[str, Any]] = {
    "stopped by a signal (SIGSTOP)": {"place": "collective", "signals": ["SIGSTOP"]},
    "not running Python": {"place": "hold"},
    "has been in step 7": {"place": "sleep"},
    "rank 1 skipped all_reduce": {"place": "skip"},
}


@pytest.mark.long
@pytest.mark.parametrize("told", HANGS)
def test_a_rank_that_hangs_is_named_with_the_collective(
    run: Run, untroubled: Path, tmp_path: Path, told: str
) -> None:
    """The generation ends, everybody's stacks are in a file, and the next one ends with the bits of
    the run left alone.
    """
    fault = {"rank": 1, "step": 7} | HANGS[told]
    done = run("--set", "elastic.max_restarts=1", *QUICK, faults=[fault])
    assert done.returncode == ExitCode.DONE, done.stderr
    (restart,) = [
        event.message
        for event in read_events(tmp_path / "run").filter_by_type(WarningEvent)
        if event.message.startswith("restart ")
    ]
    assert told in restart
    assert re.search(
        r"rank 1 (is missing from|skipped) (all_reduce|all_gather|reduce_scatter) #\d+ ", restart
    ), restart
    assert [event.step for event in read_events(tmp_path / "run").filter_by_type(ResumeEvent)] == [
        6
    ]
    if fault["place"] != "skip":  # gloo itself may find that two ends of a collective do not fit
        (report,) = (tmp_path / "run" / "hangs").iterdir()
        text = report.read_text()
        for rank in (0, 1):
            _, _, about = text.partition(f"\nrank {rank}, process ")
            assert re.search(r'File ".*", line \d+ in \w+', about.partition("\nrank ")[0]), text
    assert_same_end(tmp_path / "run", untroubled, tmp_path / "marks")
