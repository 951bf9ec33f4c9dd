"""Metrics of runs as Prometheus text (exposition format 0.0.4).

Imports no torch and no client library.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwright.telemetry.event_log import (
    CheckpointEvent,
    EvaluationEvent,
    Event,
    RanksEvent,
    ResumeEvent,
    RunStartedEvent,
    SkippedStepEvent,
    StepEvent,
    select_surviving,
)
from shardwright.telemetry.exporters import extract_scalars
from shardwright.telemetry.goodput import measure_goodput

_Labels = tuple[tuple[str, str], ...]

_HELP_TEXTS = {
    "step": "Completed optimizer steps.",
    "total_steps": "Last step of the run.",
    "last_event_timestamp_seconds": "Time of the newest event.",
    "useful_seconds": "Wall time of steps that contribute to the weights.",
    "wall_seconds": "Wall time since the first start.",
    "lost_seconds": "Wall time spent on anything else, by part.",
    "checkpoint_step": "Step of the newest complete checkpoint.",
    "resumes": "Number of resumes.",
    "skipped_steps": "Number of steps without an update.",
    "rank_own_seconds": "Step time of a rank without waiting for other ranks.",
    "rank_step_seconds": "Step time of a rank.",
    "rank_wait_seconds": "Time a rank waited for other ranks, by kind of parallelism.",
    "rank_temperature_celsius": "Temperature of a rank's device.",
}


def format_metrics(runs: Iterable[tuple[str, Sequence[Event]]]) -> str:
    """Format the metrics of runs; every metric is a gauge with a label `run`.

    >>> from shardwright.telemetry.event_log import WarningEvent
    >>> print(format_metrics([("a", [WarningEvent(message="x", time=5.0)])]).splitlines()[2])
    shardwright_last_event_timestamp_seconds{run="a"} 5
    """
    rows_by_metric: dict[str, list[tuple[_Labels, float]]] = {}
    for name, events in runs:
        for metric, labels, value in _collect_metrics(list(events)):
            rows_by_metric.setdefault(metric, []).append(((("run", name), *labels), value))
    lines = []
    for metric, rows in sorted(rows_by_metric.items()):
        help_text = _HELP_TEXTS.get(metric, "Value from the newest event that has it.")
        lines.append(f"# HELP shardwright_{metric} {help_text}")
        lines.append(f"# TYPE shardwright_{metric} gauge")
        for labels, value in rows:
            label_text = ",".join(f'{label}="{_escape(text)}"' for label, text in labels)
            lines.append(f"shardwright_{metric}{{{label_text}}} {_format_value(value)}")
    return "\n".join(lines) + "\n" if lines else ""


def _collect_metrics(events: list[Event]) -> Iterable[tuple[str, _Labels, float]]:
    if not events:
        return
    yield "last_event_timestamp_seconds", (), max(event.time for event in events)
    goodput = measure_goodput(events)
    yield "useful_seconds", (), goodput.useful_seconds
    yield "wall_seconds", (), goodput.wall_seconds
    for name, seconds in goodput.lost_seconds.items():
        yield "lost_seconds", (("part", name),), seconds
    remaining_events = select_surviving(events)
    yield "resumes", (), sum(isinstance(event, ResumeEvent) for event in events)
    yield (
        "skipped_steps",
        (),
        sum(isinstance(event, SkippedStepEvent) for event in remaining_events),
    )
    newest: dict[type[Event], Event] = {}
    for event in remaining_events:
        newest[type(event)] = event
    if isinstance(start := newest.get(RunStartedEvent), RunStartedEvent):
        yield "total_steps", (), start.total_steps
    if (saved := newest.get(CheckpointEvent)) is not None and saved.step is not None:
        yield "checkpoint_step", (), saved.step
    for kind in (StepEvent, EvaluationEvent):
        newest_event = newest.get(kind)
        if newest_event is None:
            continue
        if kind is StepEvent:
            yield "step", (), newest_event.step or 0
        for name, value in extract_scalars(newest_event).items():
            metric, _, rank = name.replace("/", "_").partition("_rank_")
            yield metric, (("rank", rank),) if rank else (), value
    if isinstance(ranks := newest.get(RanksEvent), RanksEvent):
        yield from _collect_rank_metrics(ranks)


def _collect_rank_metrics(event: RanksEvent) -> Iterable[tuple[str, _Labels, float]]:
    for rank, seconds in enumerate(event.own_seconds):
        yield "rank_own_seconds", (("rank", str(rank)),), seconds
        yield "rank_step_seconds", (("rank", str(rank)),), event.step_seconds[rank]
    for parallelism, row in event.wait_seconds.items():
        for rank, seconds in enumerate(row):
            yield "rank_wait_seconds", (("rank", str(rank)), ("cut", parallelism)), seconds
    for rank, degrees in enumerate(event.temperature_celsius or ()):
        yield "rank_temperature_celsius", (("rank", str(rank)),), degrees


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _format_value(value: float) -> str:
    """Format a value; Prometheus writes non-finite values as NaN, +Inf and -Inf."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return f"{value:.10g}"
