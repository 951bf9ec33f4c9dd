"""Time limit of a launch: a request to stop first, then a kill; other processes are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from shardwright.launch.launch_limit import LaunchLimit
from shardwright.launch.rank_outcome import STOP_FILE_NAME
from shardwright.launch.stop_signals import StopRequest

SLEEP = "import time; print('ready', flush=True); time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


def start(control: Path, code: str, rank: int = 0) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    (control / f"rank-{rank}.pid").write_text(str(process.pid))
    return process


@pytest.mark.parametrize(("code", "number"), [(SLEEP, 15), (STUBBORN, 9)])
def test_a_rank_is_stopped_and_killed_if_it_does_not_stop(
    tmp_path: Path, code: str, number: int
) -> None:
    limit = LaunchLimit(0.2, grace_seconds=0.3)
    with start(tmp_path, code) as process, limit.enforce(tmp_path, StopRequest()):
        assert process.wait(timeout=20) == -number
    assert limit.has_expired
    assert limit.has_killed == (number == 9)
    assert (tmp_path / STOP_FILE_NAME).exists()


def test_a_launch_within_the_limit_is_left_alone(tmp_path: Path) -> None:
    limit = LaunchLimit(30.0)
    with start(tmp_path, SLEEP) as process:
        with limit.enforce(tmp_path, None):
            time.sleep(0.3)
        assert process.poll() is None
        process.kill()
    assert not limit.has_expired
    assert not (tmp_path / STOP_FILE_NAME).exists()


def test_a_stop_for_another_reason_has_the_same_grace(tmp_path: Path) -> None:
    stop = StopRequest()
    limit = LaunchLimit(60.0, grace_seconds=0.3)
    with start(tmp_path, STUBBORN) as process, limit.enforce(tmp_path, stop):
        stop.record(15)
        assert process.wait(timeout=20) == -9
    assert not limit.has_expired
    assert limit.has_killed


def test_a_process_that_is_no_child_is_never_signalled(tmp_path: Path) -> None:
    """An id may belong to another process by now."""
    command = f"{sys.executable} -c 'import time; time.sleep(30)' > /dev/null 2>&1 & echo $!"
    shell = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    orphan = int(shell.stdout)
    try:
        (tmp_path / "rank-0.pid").write_text(str(orphan))
        (tmp_path / "rank-1.pid").write_text("not a number")
        limit = LaunchLimit(0.05, grace_seconds=0.1)
        with limit.enforce(tmp_path, None):
            time.sleep(0.6)
        assert limit.has_expired
        assert not limit.has_killed
        state = Path(f"/proc/{orphan}/stat").read_text().rpartition(")")[2].split()[0]
        assert state != "Z"  # it has not ended
    finally:
        with suppress(ProcessLookupError):
            os.kill(orphan, signal.SIGKILL)
