"""Asked to stop: SIGINT and SIGTERM become a flag that the training loop reads between steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

LAUNCHER_DIED = -1
"""The `StopRequest.cause` of a rank whose launcher is gone."""


class StopRequest:
    """Whether somebody asked this process to stop, and how."""

    def __init__(self) -> None:
        self.cause = 0
        """A signal's number or `LAUNCHER_DIED`; 0 where nobody asked. A number, so that ranks can tell it to each other."""

    def __bool__(self) -> bool:
        return self.cause != 0

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Signal handler. A second signal changes nothing: the save under way is what both asked for."""
        self.cause = self.cause or number


def name_cause(cause: int) -> str:
    """A `StopRequest.cause` in words."""
    return "the launcher's death" if cause == LAUNCHER_DIED else signal.Signals(cause).name


def stop_without_parent(request: StopRequest, parent: int, every_seconds: float = 1.0) -> None:
    """Ask for a stop once the process that started this one is gone: a launcher that was killed passes no signal on.

    Args:
        parent: its id, as it told it: who asks only now may find the process that takes orphans in.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(every_seconds)
        request.cause = request.cause or LAUNCHER_DIED

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


@contextmanager
def listening_for_stop() -> Iterator[StopRequest]:
    """Stop signals set the flag while the block runs; the former handlers come back after it. Main thread only."""
    request = StopRequest()
    former = {number: signal.signal(number, request.note) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
