"""Stop requests: stop signals set a flag that the training loop reads between steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

LAUNCHER_DIED = -1
"""Value of `StopRequest.cause` on a rank whose launcher has exited."""
_PARENT_CHECK_SECONDS = 1.0
_REPEAT_SECONDS = 1.0
"""A second SIGINT within this time is the same Ctrl-C: the terminal sends it to all processes, and
programs such as `uv run` forward theirs."""
_STOP_NOTICES = (
    b"\nstopping: the run saves after this step and ends\n",
    b"\nstopping: the run saves after this step and ends; Ctrl-C again ends it without a save\n",
)
"""After another signal than Ctrl-C, and after Ctrl-C."""


class StopRequest:
    """Flag that is true if this process was asked to stop, with the cause.

    Args:
        is_foreground: True for the process that a user started: it prints that it stops, and a
            second Ctrl-C interrupts it. Ranks of a launcher only record the first signal.
    """

    def __init__(self, *, is_foreground: bool = False) -> None:
        self.cause = 0
        """Signal number or `LAUNCHER_DIED`; 0 for none. A number, so ranks can exchange it."""
        self._is_foreground = is_foreground
        self._recorded_at_seconds = 0.0

    def __bool__(self) -> bool:
        return self.cause != 0

    def record(self, number: int, frame: FrameType | None = None) -> None:
        """Record a stop signal, as its handler; the first cause stays.

        Raises:
            KeyboardInterrupt: a further Ctrl-C in the foreground.
        """
        now_seconds = time.monotonic()
        if not self.cause:
            self.cause = number
            self._recorded_at_seconds = now_seconds
            if self._is_foreground:
                # Not through a stream: the signal may have interrupted one of its writes.
                with suppress(OSError):
                    os.write(2, _STOP_NOTICES[number == signal.SIGINT])
        elif (
            self._is_foreground
            and number == signal.SIGINT
            and now_seconds - self._recorded_at_seconds >= _REPEAT_SECONDS
        ):
            raise KeyboardInterrupt


def describe_cause(cause: int) -> str:
    """Describe a `StopRequest.cause` in words."""
    return "the launcher's death" if cause == LAUNCHER_DIED else signal.Signals(cause).name


@contextmanager
def stop_when_parent_exits(request: StopRequest, parent_pid: int) -> Iterator[None]:
    """Request a stop when the launcher exits during the block: a killed one forwards no signal.

    Args:
        parent_pid: Process id of the launcher as it reported it. `os.getppid()` may already be
            the process that adopts orphans.
    """

    closing = threading.Event()

    def watch() -> None:
        while os.getppid() == parent_pid:
            if closing.wait(_PARENT_CHECK_SECONDS):
                return
        request.cause = request.cause or LAUNCHER_DIED

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
    try:
        yield
    finally:
        closing.set()


@contextmanager
def listen_for_stop(*, is_foreground: bool = False) -> Iterator[StopRequest]:
    """Record stop signals during the block, then restore the handlers. Main thread only.

    Args:
        is_foreground: see `StopRequest`.
    """
    request = StopRequest(is_foreground=is_foreground)
    former = {number: signal.signal(number, request.record) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def ignore_stop_signals() -> None:
    """Ignore stop signals from here on: the process is about to exit with its result."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
