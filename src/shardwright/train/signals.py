"""Asked to stop: SIGINT and SIGTERM become a flag that the training loop reads between steps."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """Whether somebody asked this process to stop, and how."""

    def __init__(self) -> None:
        self.name: str | None = None

    def __bool__(self) -> bool:
        return self.name is not None

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Signal handler. A second signal changes nothing: the save under way is what both asked for."""
        self.name = self.name or signal.Signals(number).name


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
