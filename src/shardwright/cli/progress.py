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
    """A bar on standard error for what is read and tokenised; nothing at all when the cache has it, or off a terminal.

    What the data rooms log meanwhile is held back: what matters of it is told afterwards.
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
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield tell
    finally:
        log.setLevel(level)
        if tasks:
            bar.stop()
