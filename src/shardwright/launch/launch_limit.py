"""Time limit of a launch: ranks are stopped when it expires, and killed if they do not stop."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwright.launch.rank_outcome import write_stop
from shardwright.launch.stop_signals import StopRequest

GRACE_SECONDS = 5.0
"""Seconds between the request to stop and the kill."""
_POLL_SECONDS = 0.1


class LaunchLimit:
    """Time limit of one launch in seconds; `has_expired` is True once it has stopped the ranks.

    A stop that was requested for another reason has the same grace: ranks that still run
    `grace_seconds` after it are killed.
    """

    def __init__(self, seconds: float, grace_seconds: float = GRACE_SECONDS) -> None:
        self.seconds = seconds
        self.grace_seconds = grace_seconds
        self.has_expired = False
        self.has_killed = False
        """True if ranks were killed because they did not stop."""

    @contextmanager
    def enforce(self, control: Path, stop: StopRequest | None) -> Iterator[None]:
        """Enforce the limit during the block, on the ranks that write their process ids to
        folder `control`."""
        closing = threading.Event()
        thread = threading.Thread(
            target=self._run, args=(control, stop, closing), name="time-limit", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            closing.set()
            thread.join()

    def _run(self, control: Path, stop: StopRequest | None, closing: threading.Event) -> None:
        limit = time.monotonic() + self.seconds
        while not stop and time.monotonic() < limit:
            if closing.wait(_POLL_SECONDS):
                return
        if not stop:
            self.has_expired = True
            write_stop(control, signal.SIGTERM)  # for ranks without a process id file yet
            _send(control, signal.SIGTERM)
        if closing.wait(self.grace_seconds):
            return
        # A rank that is still starting writes its process id later.
        while not closing.wait(_POLL_SECONDS):
            self.has_killed |= _send(control, signal.SIGKILL)


def _send(control: Path, number: signal.Signals) -> bool:
    """Send a signal to the ranks that have written their process id; True if there are any.

    They are children of this process, so an id that another process has since taken is left alone.
    """
    has_sent = False
    for path in control.glob("rank-*.pid"):
        with suppress(ProcessLookupError, ValueError, OSError):
            pid = int(path.read_text())
            if _is_child(pid):
                os.kill(pid, number)
                has_sent = True
    return has_sent


def _is_child(pid: int) -> bool:
    """Return True if a process is a running child of this one; also where /proc is missing."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return not Path("/proc/self/stat").exists()
    return fields[0] != "Z" and int(fields[1]) == os.getpid()
