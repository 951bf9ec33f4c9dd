"""What the rooms log through `logging` reaches the run's log file, and a warning reaches the terminal and the events."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwright.errors import RunFailed
from shardwright.telemetry.speaker import Speaker

LOGGER = logging.getLogger("shardwright")


class _Warnings(logging.Handler):
    """Warnings become events, on rank 0 and elsewhere."""

    def __init__(self, speaker: Speaker) -> None:
        super().__init__(logging.WARNING)
        self.speaker = speaker

    def emit(self, record: logging.LogRecord) -> None:
        # Where the event file cannot be written the run ends at its next event, not in the middle of whatever logged this.
        with suppress(RunFailed):
            self.speaker.write("warning", message=record.getMessage())


@contextmanager
def logging_to(speaker: Speaker, path: Path, *, rank: int) -> Iterator[None]:
    """While the block runs, shardwright's log goes to the speaker (warnings) and, on rank 0, to the file (everything)."""
    handlers: list[logging.Handler] = [_Warnings(speaker)]
    if rank == 0:
        file = logging.FileHandler(path, encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s  %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
        file.addFilter(lambda record: record.levelno < logging.WARNING)  # the speaker writes those
        handlers.append(file)
    former = LOGGER.level
    LOGGER.setLevel(logging.INFO)
    for handler in handlers:
        LOGGER.addHandler(handler)
    try:
        yield
    finally:
        LOGGER.setLevel(former)
        for handler in handlers:
            LOGGER.removeHandler(handler)
            handler.close()
