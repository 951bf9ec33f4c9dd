"""Progress bar of a run on a terminal: one live line, below a line per other event."""

from __future__ import annotations

import math
import time
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardwright.telemetry.event_log import (
    MEASUREMENT_TYPES,
    CheckpointEvent,
    EvaluationEvent,
    Event,
    FailureEvent,
    PreemptionEvent,
    ProfileEvent,
    ReshardEvent,
    RestartEvent,
    ResumeEvent,
    RollbackEvent,
    RunFinishedEvent,
    RunStartedEvent,
    SkippedStepEvent,
    StepEvent,
    WarningEvent,
)
from shardwright.telemetry.meter import RunProgress
from shardwright.telemetry.sinks import (
    describe_event,
    format_loss,
    format_remaining,
    is_printed_at_the_end,
)
from shardwright.units import format_bytes, format_count

_MIN_BAR_WIDTH = 12
_MAX_BAR_WIDTH = 40
_MIN_DRAW_INTERVAL_SECONDS = 0.1

_EVENT_STYLES: dict[type[Event], str] = {
    RunStartedEvent: "bold",
    EvaluationEvent: "cyan",
    CheckpointEvent: "dim",
    ProfileEvent: "dim",
    RestartEvent: "yellow",
    ResumeEvent: "cyan",
    ReshardEvent: "cyan",
    RollbackEvent: "yellow",
    SkippedStepEvent: "yellow",
    WarningEvent: "yellow",
    PreemptionEvent: "yellow",
    FailureEvent: "bold red",
    RunFinishedEvent: "bold green",
}


class StatusLine:
    """Live line with bar, step, loss, tokens/s, memory, MFU and time left.

    On a narrow terminal MFU is dropped first and the loss last.
    """

    def __init__(self, progress: RunProgress) -> None:
        self.progress = progress
        self.memory_bytes = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the line into the available width."""
        progress = self.progress
        count = Text(f"{progress.step:,}/{progress.total_steps:,}")
        # By importance: a narrow terminal drops the last ones.
        segments: list[tuple[str, Text]] = []
        if math.isfinite(progress.loss):
            segments.append(
                ("loss", Text.assemble(("loss ", "dim"), (format_loss(progress.loss), "bold")))
            )
        time_left = format_remaining(progress)
        if time_left:
            segments.append(("left", Text.assemble(time_left, (" left", "dim"))))
        if math.isfinite(progress.tokens_per_second):
            segments.append(
                (
                    "speed",
                    Text.assemble(format_count(progress.tokens_per_second), (" tokens/s", "dim")),
                )
            )
        if self.memory_bytes:
            segments.append(("memory", Text(format_bytes(self.memory_bytes))))
        if math.isfinite(progress.mfu):
            segments.append(("mfu", Text.assemble(("MFU ", "dim"), f"{progress.mfu:.0%}")))
        # Keep two columns free for the echoed `^C`, which would wrap on a full line.
        available_width = options.max_width - 2 - _MIN_BAR_WIDTH - 2 - count.cell_len
        fitting = []
        for name, text in segments:
            if text.cell_len + 2 <= available_width:
                available_width -= text.cell_len + 2
                fitting.append((name, text))
        fitting.sort(key=lambda pair: pair[0] == "left")  # show the time left at the end
        texts = [text for _, text in fitting]
        line = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        bar = ProgressBar(
            total=max(1, progress.total_steps),
            completed=progress.step,
            width=min(_MAX_BAR_WIDTH, _MIN_BAR_WIDTH + max(0, available_width)),
            complete_style="cyan",
            finished_style="green",
        )
        line.add_row(bar, count, *texts)
        yield line


class Terminal:
    """Sink that draws the status line on a terminal (standard error, not standard output).

    There is no drawing thread: an event updates the line, at most ten times a second.
    """

    def __init__(self, stream: TextIO, *, width: int | None = None) -> None:
        self._console = Console(
            file=stream, width=width, highlight=False, markup=False, emoji=False
        )
        self._progress = RunProgress()
        self._line = StatusLine(self._progress)
        self._live: Live | None = None
        self._last_draw_time = -math.inf

    def on_event(self, event: Event) -> None:
        """Update the bar for a step; print a line above it for any other event."""
        self._progress.on_event(event)
        if isinstance(event, MEASUREMENT_TYPES):
            return
        if isinstance(event, StepEvent):
            if event.memory_bytes:
                self._line.memory_bytes = max(event.memory_bytes)
            self._draw(should_force=event.step == self._progress.total_steps)
            return
        if isinstance(event, RunFinishedEvent | FailureEvent):
            self.close()  # print the last line below the bar
        if is_printed_at_the_end(event):
            return
        stopped_early = isinstance(event, RunFinishedEvent) and event.status != "completed"
        self._console.print(
            Text(
                describe_event(event),
                style="yellow" if stopped_early else _EVENT_STYLES[type(event)],
            )
        )
        if isinstance(event, RunStartedEvent | ResumeEvent):
            self._draw(should_force=True)

    def _draw(self, *, should_force: bool) -> None:
        now = time.monotonic()
        if not should_force and now - self._last_draw_time < _MIN_DRAW_INTERVAL_SECONDS:
            return
        self._last_draw_time = now
        if self._live is None:
            self._live = Live(
                self._line, console=self._console, auto_refresh=False, redirect_stdout=False
            )
            self._live.start()
        self._live.refresh()

    def close(self) -> None:
        """Stop updating the bar and restore the cursor."""
        if self._live is not None:
            live = self._live
            self._live = None
            live.stop()
