"""Logging of a run: messages go to the log file, warnings to the terminal and the events."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwright.errors import RunFailed
from shardwright.telemetry.speaker import Speaker

LOGGER = logging.getLogger("shardwright")


class _Warnings(logging.Handler):
    """Handler that writes warnings as events, on every rank."""

    def __init__(self, speaker: Speaker) -> None:
        super().__init__(logging.WARNING)
        self.speaker = speaker

    def emit(self, record: logging.LogRecord) -> None:
        # If the event file is not writable, the run fails at its next event, not in a log call.
        with suppress(RunFailed):
            self.speaker.write("warning", message=record.getMessage())


@contextmanager
def logging_to(speaker: Speaker, path: Path, *, rank: int) -> Iterator[None]:
    """Send shardwright's warnings to `speaker` and, on rank 0, its other messages to a file."""
    handlers: list[logging.Handler] = [_Warnings(speaker)]
    if rank == 0:
        file = logging.FileHandler(path, encoding="utf-8")
        file.setFormatter(
            logging.Formatter("%(asctime)s  %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
        )
        file.addFilter(lambda record: record.levelno < logging.WARNING)  # events
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
