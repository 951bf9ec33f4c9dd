"""Where events are shown: a sink takes every event and shows what it likes. Here: lines of text.

The bar is in terminal.py, TensorBoard and Weights & Biases in exporters.py; speaker.py hands the events out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Protocol, TextIO

from shardwright.telemetry.events import (
    MEASUREMENTS,
    Checkpoint,
    Evaluation,
    Event,
    Failed,
    Preempted,
    Profiled,
    Resumed,
    RolledBack,
    RunFinished,
    RunStarted,
    SkippedStep,
    Step,
    Warned,
)
from shardwright.telemetry.meter import Progress
from shardwright.units import format_bytes, format_count, format_seconds


class Sink(Protocol):
    """Something that shows events."""

    def on_event(self, event: Event) -> None:
        """Show the event, or pass it by."""

    def close(self) -> None:
        """Show nothing more; let go of files and the screen."""


def format_loss(loss: float) -> str:
    """
    >>> format_loss(2.34567), format_loss(float("nan")), format_loss(123.4)
    ('2.3457', 'nan', '123.4')
    """
    return f"{loss:.4f}" if abs(loss) < 100 else f"{loss:.4g}"


def describe(event: Event, progress: Progress | None = None) -> str:
    """The event as one plain line, without the time. `progress` adds the time left to a step."""
    match event:
        case RunStarted():
            devices = _count_devices(event.devices)
            host = "" if event.host in devices else f" on {event.host}"
            return (
                f"{event.name}: {format_count(event.num_parameters)} parameters, layout {event.layout}, "
                f"{devices}{host}, {event.total_steps:,} steps of {_at_most(event)}"
                f"{format_count(event.global_batch_tokens)} tokens, {_describe_precision(event)}"
            )
        case Step():
            return _describe_step(event, progress)
        case Evaluation():
            best = "  best so far" if event.best else ""
            return (
                f"evaluation at step {event.step:,}  loss {format_loss(event.loss)}  perplexity {event.perplexity:.4g}"
                f"  ({format_seconds(event.seconds)}){best}"
            )
        case Checkpoint():
            size, seconds = format_bytes(event.size_bytes), format_seconds(event.seconds)
            name = PurePath(event.path).name  # of the run folder's checkpoints: the whole path would fill the line
            background = event.stall_seconds is not None and event.stall_seconds < 0.9 * event.seconds
            stall = f", training waited {format_seconds(event.stall_seconds or 0.0)}" if background else ""
            return f"checkpoint at step {event.step:,}  {name}  ({size} in {seconds}{stall})"
        case Profiled():
            ranks, error = f"{event.ranks} rank{'s' if event.ranks != 1 else ''}", format_seconds(event.clock_error_seconds)
            return f"profile of step {event.step:,}  {event.path}  ({ranks} on one clock, within {error})"
        case Resumed():
            return f"resumed at step {event.step:,} from {event.path}"
        case RolledBack():
            return (
                f"back from step {event.from_step:,} to step {event.step:,} ({PurePath(event.path).name}): {event.reason}; "
                f"{event.num_samples:,} samples from position {event.first_sample:,} on are left out"
            )
        case SkippedStep():
            scale = f", loss scale now {event.loss_scale:g}" if event.loss_scale is not None else ""
            return f"skipped step {event.step:,}: {event.reason} ({event.in_a_row} in a row{scale})"
        case Warned():
            return f"warning{_of_rank(event.rank)}: {event.message}"
        case Failed():
            return f"failed{_of_rank(event.rank)}: {event.message}"
        case Preempted():
            return f"asked to stop ({event.reason})" + (f" at step {event.step:,}" if event.step is not None else "")
        case RunFinished():
            loss = f", loss {format_loss(event.final_loss)}" if event.final_loss is not None else ""
            return f"{event.status} after {format_seconds(event.total_seconds)}, {format_count(event.total_tokens)} tokens{loss}"
    raise AssertionError(f"{event.kind} has no line")


def _at_most(event: RunStarted) -> str:
    """Where rows end with the longest of their micro-batch a step has fewer tokens than its rows have places."""
    return "at most " if event.plan.get("batch", {}).get("row_multiple") else ""


def _describe_precision(event: RunStarted) -> str:
    """The kind, and why `precision: auto` came to it; runs of earlier versions have no reason."""
    kind, reason = event.plan.get("precision", {}).get("kind", "unknown precision"), event.plan.get("precision_reason")
    return kind if reason is None else f"{kind} (precision auto: {reason})"


def _describe_step(event: Step, progress: Progress | None) -> str:
    total = f"/{progress.total_steps:,}" if progress and progress.total_steps else ""
    parts = [
        f"step {event.step:,}{total}",
        f"loss {format_loss(event.loss)}",
        f"learning rate {event.learning_rate:.3g}",
        f"gradient norm {event.gradient_norm:.3g}",
        f"{format_count(event.tokens_per_second)} tokens/s",
    ]
    if event.mfu is not None:
        parts.append(f"MFU {event.mfu:.1%}")
    if event.memory_bytes:
        parts.append(f"memory {format_bytes(max(event.memory_bytes))}")
    if progress is not None and format_remaining(progress):
        parts.append(f"{format_remaining(progress)} left")
    return "  ".join(parts)


def format_remaining(progress: Progress) -> str:
    """Time left in whole seconds at least; empty while it is not known and when nothing is left."""
    seconds = progress.remaining_seconds
    if not math.isfinite(seconds) or progress.step >= progress.total_steps:
        return ""
    return f"{math.ceil(seconds)} s" if seconds < 60 else format_seconds(seconds)


def _of_rank(rank: int | None) -> str:
    return "" if rank is None else f" on rank {rank}"


def _count_devices(devices: Sequence[str]) -> str:
    """
    >>> _count_devices(("cpu", "cpu"))
    '2 x cpu'
    """
    return ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices))


class PlainLines:
    """One line per event on a stream that is no terminal; steps every `every_steps`, the last one always."""

    def __init__(self, stream: TextIO, *, every_steps: int = 1, timestamps: bool = False) -> None:
        self._stream = stream
        self._every_steps = every_steps
        self._timestamps = timestamps
        self._progress = Progress()

    def on_event(self, event: Event) -> None:
        """Write the event's line."""
        self._progress.on_event(event)
        if isinstance(event, MEASUREMENTS):
            return
        if isinstance(event, Step) and (event.step or 0) % self._every_steps and event.step != self._progress.total_steps:
            return
        stamp = time.strftime("%Y-%m-%d %H:%M:%S  ", time.localtime(event.time)) if self._timestamps else ""
        self._stream.write(f"{stamp}{describe(event, self._progress)}\n")
        self._stream.flush()

    def close(self) -> None:
        """The stream is its owner's to close."""


class LogFile(PlainLines):
    """The plain lines with the time of day, appended to a file."""

    def __init__(self, path: Path, *, every_steps: int = 1) -> None:
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
        super().__init__(self._file, every_steps=every_steps, timestamps=True)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RankedErrors:
    """What a rank other than 0 says: its warnings and failures, each line with the rank."""

    def __init__(self, rank: int, stream: TextIO) -> None:
        self._rank = rank
        self._stream = stream

    def on_event(self, event: Event) -> None:
        """Write warnings and failures, pass all else by."""
        if isinstance(event, Warned | Failed):
            for line in event.message.splitlines():
                self._stream.write(f"[rank {self._rank}] {event.kind}: {line}\n")
            self._stream.flush()

    def close(self) -> None:
        """The stream is its owner's to close."""
