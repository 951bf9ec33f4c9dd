"""Start of worker processes that Ctrl-C does not reach: it ends their parent, which ends them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


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
