"""Sinks that show events as lines of text, and the protocol of all sinks.

The progress bar is `telemetry.terminal`; exporters such as TensorBoard are in
`telemetry.exporters`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Protocol, TextIO

from shardwright.control_characters import escape_control_characters
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
from shardwright.units import format_bytes, format_count, format_items, format_seconds

_SHARED_ERRORS = ("SaveFailed: ", "NonFiniteError: ")
"""Errors that all ranks raise with one text. The command prints it when it ends."""


class Sink(Protocol):
    """Receiver of events that shows or exports them."""

    def on_event(self, event: Event) -> None:
        """Show the event, or ignore it."""

    def close(self) -> None:
        """Release files and the terminal; no event follows."""


def format_loss(loss: float) -> str:
    """Format a loss with about five significant digits.

    >>> format_loss(2.34567), format_loss(float("nan")), format_loss(123.4)
    ('2.3457', 'nan', '123.4')
    """
    return f"{loss:.4f}" if abs(loss) < 100 else f"{loss:.4g}"


def is_printed_at_the_end(event: Event) -> bool:
    """Return True if the command ends with the text of this event as its error.

    Sinks of a terminal leave such an event out: the text would appear once more per rank.
    """
    return isinstance(event, FailureEvent) and event.message.startswith(_SHARED_ERRORS)


def describe_event(event: Event, progress: RunProgress | None = None) -> str:
    """Describe an event in one line, without its time; `progress` adds the time left.

    Texts of a recipe, a checkpoint or a library may have control characters, which are escaped.
    """
    return escape_control_characters(_describe_event(event, progress))


def _describe_event(event: Event, progress: RunProgress | None) -> str:
    match event:
        case RunStartedEvent():
            devices = _summarise_devices(event.devices)
            host = "" if event.host in devices else f" on {event.host}"
            return (
                f"{event.name}: {format_count(event.num_parameters)} parameters, "
                f"layout {event.layout}, "
                f"{devices}{host}, {event.total_steps:,} steps of {_format_token_bound(event)}"
                f"{format_count(event.global_batch_tokens)} tokens, "
                f"{_describe_precision(event)}{_describe_compilation(event)}"
                f"{_describe_recompute(event)}"
            )
        case StepEvent():
            return _describe_step(event, progress)
        case EvaluationEvent():
            return _describe_evaluation(event)
        case CheckpointEvent():
            size = format_bytes(event.size_bytes)
            seconds = format_seconds(event.seconds)
            name = PurePath(event.path).name  # the whole path would fill the line
            stall = ""
            if event.stall_seconds is not None and event.stall_seconds < 0.9 * event.seconds:
                stall = f", training waited {format_seconds(event.stall_seconds)}"
            return f"checkpoint at step {event.step:,}  {name}  ({size} in {seconds}{stall})"
        case ProfileEvent():
            ranks = format_items(event.ranks, "rank")
            clocks = f"clocks aligned within {format_seconds(event.clock_error_seconds)}"
            line = f"profile of step {event.step:,}  {event.path}  ({ranks}, {clocks})"
            return f"{line}: {event.summary}" if event.summary else line
        case RestartEvent():
            ranks = format_items(event.world_size, "rank")
            head = f"restart {event.number} of at most {event.max_restarts}, {ranks}"
            return f"{head}: {event.reason}{_describe_survivors(event)}"
        case ResumeEvent():
            lost = (
                f"; finished steps lost: {event.steps_lost}" if event.steps_lost is not None else ""
            )
            return f"resumed at step {event.step:,} from {event.path or 'copies in memory'}{lost}"
        case ReshardEvent():
            return (
                f"resharded at step {event.step:,} {_describe_resizing(event)}"
                f"{event.from_layout} to {event.to_layout}, from {event.source}"
                + (f" in {format_seconds(event.seconds)}" if event.seconds is not None else "")
            )
        case RollbackEvent():
            return (
                f"rolled back from step {event.from_step:,} to step {event.step:,} "
                f"({PurePath(event.path).name}): {event.reason}; "
                f"skipping {event.num_samples:,} samples from position {event.first_sample:,} "
                "on"
            )
        case SkippedStepEvent():
            scale = f", loss scale now {event.loss_scale:g}" if event.loss_scale is not None else ""
            return f"skipped step {event.step:,}: {event.reason} ({event.in_a_row} in a row{scale})"
        case WarningEvent():
            return f"warning{_format_rank(event.rank)}: {event.message}"
        case FailureEvent():
            return f"failed{_format_rank(event.rank)}: {event.message}"
        case PreemptionEvent():
            return f"stop requested ({event.reason})" + (
                f" at step {event.step:,}" if event.step is not None else ""
            )
        case RunFinishedEvent():
            loss = f", loss {format_loss(event.final_loss)}" if event.final_loss is not None else ""
            tokens = f"{format_count(event.total_tokens)} tokens"
            return f"{event.status} after {format_seconds(event.total_seconds)}, {tokens}{loss}"
    raise AssertionError(f"{event.kind} has no line")


def _format_token_bound(event: RunStartedEvent) -> str:
    """Return "at most " if rows are trimmed, so that steps differ in number of tokens."""
    return "at most " if event.plan.get("batch", {}).get("row_multiple") else ""


def _describe_precision(event: RunStartedEvent) -> str:
    """Describe the precision and, except in old runs, why `precision: auto` chose it."""
    kind = event.plan.get("precision", {}).get("kind", "unknown precision")
    reason = event.plan.get("precision_reason")
    return kind if reason is None else f"{kind} (precision auto: {reason})"


def _describe_compilation(event: RunStartedEvent) -> str:
    """Describe what `model.compile: auto` chose and why; empty if the recipe chose."""
    reason = event.plan.get("compile_reason")
    if reason is None:
        return ""
    is_compiled = event.plan.get("compile")
    return f", blocks {'compiled' if is_compiled else 'not compiled'} (compile auto: {reason})"


def _describe_recompute(event: RunStartedEvent) -> str:
    """Describe the results that the plan keeps of each layer; empty if the recipe names a kind."""
    choice = event.plan.get("recompute_choice")
    return "" if choice is None else f", recompute {choice['description']}"


def _describe_step(event: StepEvent, progress: RunProgress | None) -> str:
    total = f"/{progress.total_steps:,}" if progress and progress.total_steps else ""
    parts = [
        f"step {event.step:,}{total}",
        f"loss {format_loss(event.loss)}",
        *filter(None, [_describe_rewards(event)]),
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


def _describe_evaluation(event: EvaluationEvent) -> str:
    best = "  best so far" if event.best else ""
    # A preference loss is no mean over tokens: its exponential is not a perplexity.
    quality = _describe_rewards(event) or f"perplexity {event.perplexity:.4g}"
    return (
        f"evaluation at step {event.step:,}  loss {format_loss(event.loss)}  "
        f"{quality}  ({format_seconds(event.seconds)}){best}"
    )


def _describe_rewards(event: StepEvent | EvaluationEvent) -> str:
    """Describe the rewards of preference tuning; empty for other training."""
    if event.reward_margin is None or event.reward_accuracy is None:
        return ""
    return f"reward margin {event.reward_margin:.3g}  accuracy {event.reward_accuracy:.0%}"


def format_remaining(progress: RunProgress) -> str:
    """Format the time left, in whole seconds or longer units; empty if unknown or zero."""
    seconds = progress.remaining_seconds
    if not math.isfinite(seconds) or progress.step >= progress.total_steps:
        return ""
    return f"{math.ceil(seconds)} s" if seconds < 60 else format_seconds(seconds)


def _describe_survivors(event: RestartEvent) -> str:
    """Describe which processes a warm restart keeps; empty for other restarts."""
    if not event.is_warm:
        return ""
    text = ""
    if event.stuck_ranks:
        text = f". Processes that were stuck and are replaced: {_name_ranks(event.stuck_ranks)}"
    if not event.surviving_ranks:
        return f"{text}. No process stays (cold restart)"
    return f"{text}. Processes that stay: {_name_ranks(event.surviving_ranks)}"


def _describe_resizing(event: ReshardEvent) -> str:
    """Describe the change of the number of ranks, if the ranks before are known."""
    if event.former_world_size is None:
        return f"for {format_items(event.world_size, 'rank')}: "
    return f"from {format_items(event.former_world_size, 'rank')} to {event.world_size}: "


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _format_rank(rank: int | None) -> str:
    return "" if rank is None else f" on rank {rank}"


def _summarise_devices(devices: Sequence[str]) -> str:
    """Count devices by name.

    >>> _summarise_devices(("cpu", "cpu"))
    '2 x cpu'
    """
    return ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices))


class PlainLines:
    """Sink that writes one line per event; for steps every `every_steps`-th and the last."""

    def __init__(
        self, stream: TextIO, *, every_steps: int = 1, has_timestamps: bool = False
    ) -> None:
        self._stream = stream
        self._every_steps = every_steps
        self._has_timestamps = has_timestamps
        self._progress = RunProgress()

    def on_event(self, event: Event) -> None:
        """Write the event's line."""
        self._progress.on_event(event)
        if isinstance(event, MEASUREMENT_TYPES):
            return
        if not self._has_timestamps and is_printed_at_the_end(event):
            return
        if (
            isinstance(event, StepEvent)
            and (event.step or 0) % self._every_steps
            and event.step != self._progress.total_steps
        ):
            return
        stamp = (
            time.strftime("%Y-%m-%d %H:%M:%S  ", time.localtime(event.time))
            if self._has_timestamps
            else ""
        )
        self._stream.write(f"{stamp}{describe_event(event, self._progress)}\n")
        self._stream.flush()

    def close(self) -> None:
        """Leave the stream open; its owner closes it."""


class LogFile(PlainLines):
    """Sink that appends the lines of `PlainLines` with date and time to a file."""

    def __init__(self, path: Path, *, every_steps: int = 1) -> None:
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
        super().__init__(self._file, every_steps=every_steps, has_timestamps=True)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RankErrorLines:
    """Sink of ranks other than 0: writes warnings and failures, each line with the rank."""

    def __init__(self, rank: int, stream: TextIO) -> None:
        self._rank = rank
        self._stream = stream

    def on_event(self, event: Event) -> None:
        """Write warnings and failures; ignore other events."""
        if isinstance(event, WarningEvent | FailureEvent) and not is_printed_at_the_end(event):
            for line in event.message.splitlines():
                self._stream.write(f"[rank {self._rank}] {event.kind}: {line}\n")
            self._stream.flush()

    def close(self) -> None:
        """Leave the stream open; its owner closes it."""
