"""Logging of a run: messages go to the log file, warnings to the terminal and the events."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwright.errors import RunFailed
from shardwright.telemetry.event_logger import EventLogger

logger = logging.getLogger("shardwright")


class _WarningHandler(logging.Handler):
    """Handler that writes warnings as events, on every rank."""

    def __init__(self, event_logger: EventLogger) -> None:
        super().__init__(logging.WARNING)
        self.event_logger = event_logger

    def emit(self, record: logging.LogRecord) -> None:
        # If the event file is not writable, the run fails at its next event, not in a log call.
        with suppress(RunFailed):
            self.event_logger.log("warning", message=record.getMessage())


@contextmanager
def log_to_run(event_logger: EventLogger, path: Path, *, rank: int) -> Iterator[None]:
    """Send shardwright's warnings to `event_logger` and, on rank 0, its other messages to a
    file.
    """
    handlers: list[logging.Handler] = [_WarningHandler(event_logger)]
    if rank == 0:
        file = logging.FileHandler(path, encoding="utf-8")
        file.setFormatter(
            logging.Formatter("%(asctime)s  %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
        )
        file.addFilter(lambda record: record.levelno < logging.WARNING)  # events
        handlers.append(file)
    former = logger.level
    logger.setLevel(logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(former)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
