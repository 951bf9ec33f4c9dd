"""Start of worker processes that Ctrl-C does not reach: it ends their parent, which ends them.
So does SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType


@contextmanager
def interrupt_on_termination() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM too during the block, so that the block ends its workers.

    By default SIGTERM ends this process at once, and its workers run until they answer it.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone sets handlers
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


@contextmanager
def block_interrupts() -> Iterator[None]:
    """Block SIGINT in processes that this thread starts in the block, for as long as they run.

    A terminal sends Ctrl-C to all of them. Each would print a traceback, most of them of an
    import. In this thread the signal waits for the end of the block.
    """
    resource_tracker.ensure_running()  # or its start, in the block, would end the blocking
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
