"""Progress bar for reading and tokenising data."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from shardwright.cli.output.console import open_console
from shardwright.data.sources.source_files import ProgressCallback as OnProgress


@contextmanager
def show_data_progress() -> Iterator[OnProgress]:
    """Show a progress bar on standard error while data is read and tokenised.

    Nothing is shown if the data is cached or if standard error is not a terminal. Log warnings
    are held back until the bar is removed.
    """
    columns = (
        TextColumn("{task.description:28}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    console = open_console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    tasks: dict[str, TaskID] = {}

    def update(stage: str, done: int, total: int) -> None:
        if not tasks:
            bar.start()
        if stage not in tasks:
            for earlier in tasks.values():
                bar.update(earlier, visible=False)
            tasks[stage] = bar.add_task(stage, total=max(1, total))
        bar.update(tasks[stage], completed=done)

    data_logger = logging.getLogger("shardwright.data")
    buffer = _LogBuffer(logging.WARNING)
    data_logger.addHandler(buffer)
    propagates = data_logger.propagate
    data_logger.propagate = False
    try:
        yield update
    finally:
        data_logger.removeHandler(buffer)
        data_logger.propagate = propagates
        if tasks:
            bar.stop()
        for record in buffer.records:
            logging.getLogger(record.name).handle(record)


class _LogBuffer(logging.Handler):
    """Log handler that stores records."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
