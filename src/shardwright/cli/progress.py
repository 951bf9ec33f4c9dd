"""A bar for what is read and tokenised before a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from shardwright.cli.console import open_console
from shardwright.data.prepare import Progress as OnProgress


@contextmanager
def data_progress() -> Iterator[OnProgress]:
    """Show a bar on standard error while data are read and tokenised; nothing when the cache has them, or off a terminal.

    Warnings that are logged meanwhile are shown afterwards, where they do not break the bar.
    """
    columns = (TextColumn("{task.description:28}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = open_console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    tasks: dict[str, TaskID] = {}

    def tell(stage: str, done: int, total: int) -> None:
        if not tasks:
            bar.start()
        if stage not in tasks:
            for earlier in tasks.values():
                bar.update(earlier, visible=False)
            tasks[stage] = bar.add_task(stage, total=max(1, total))
        bar.update(tasks[stage], completed=done)

    log = logging.getLogger("shardwright.data")
    held = _Held(logging.WARNING)
    log.addHandler(held)
    propagates, log.propagate = log.propagate, False
    try:
        yield tell
    finally:
        log.removeHandler(held)
        log.propagate = propagates
        if tasks:
            bar.stop()
        for record in held.records:
            logging.getLogger(record.name).handle(record)


class _Held(logging.Handler):
    """Keeps records for later."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
