"""The newest numbers of runs as Prometheus text (exposition format 0.0.4). Imports no torch and no client library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwright.telemetry.events import Checkpoint, Evaluation, Event, Ranks, Resumed, RunStarted, SkippedStep, Step, surviving
from shardwright.telemetry.exporters import scalars_of
from shardwright.telemetry.goodput import measure_goodput

_Labels = tuple[tuple[str, str], ...]

_HELP = {
    "step": "Optimizer steps done.",
    "total_steps": "Where the run means to end.",
    "last_event_timestamp_seconds": "When the run last said anything.",
    "useful_seconds": "Wall time in steps that are in the weights.",
    "wall_seconds": "Wall time since the first start.",
    "lost_seconds": "Wall time that went into anything else.",
    "checkpoint_step": "The newest whole checkpoint.",
    "resumes": "How often the run was resumed.",
    "skipped_steps": "Steps that left the weights as they were.",
    "rank_own_seconds": "A rank's step without waiting for others.",
    "rank_step_seconds": "A rank's step.",
    "rank_wait_seconds": "What a rank waited for others, by cut.",
    "rank_temperature_celsius": "A rank's device.",
}


def write_metrics(runs: Iterable[tuple[str, Sequence[Event]]]) -> str:
    """The metrics of runs by name: everything is a gauge, labelled with its run.

    >>> from shardwright.telemetry.events import Warned
    >>> print(write_metrics([("a", [Warned(message="x", time=5.0)])]).splitlines()[2])
    shardwright_last_event_timestamp_seconds{run="a"} 5
    """
    found: dict[str, list[tuple[_Labels, float]]] = {}
    for name, events in runs:
        for metric, labels, value in _metrics_of(list(events)):
            found.setdefault(metric, []).append(((("run", name), *labels), value))
    lines = []
    for metric, rows in sorted(found.items()):
        lines.append(f"# HELP shardwright_{metric} {_HELP.get(metric, 'Of the newest event that tells it.')}")
        lines.append(f"# TYPE shardwright_{metric} gauge")
        for labels, value in rows:
            told = ",".join(f'{label}="{_escape(text)}"' for label, text in labels)
            lines.append(f"shardwright_{metric}{{{told}}} {_write(value)}")
    return "\n".join(lines) + "\n" if lines else ""


def _metrics_of(events: list[Event]) -> Iterable[tuple[str, _Labels, float]]:
    if not events:
        return
    yield "last_event_timestamp_seconds", (), max(event.time for event in events)
    goodput = measure_goodput(events)
    yield "useful_seconds", (), goodput.useful_seconds
    yield "wall_seconds", (), goodput.wall_seconds
    for name, seconds in goodput.lost_seconds.items():
        yield "lost_seconds", (("part", name),), seconds
    kept = surviving(events)
    yield "resumes", (), sum(isinstance(event, Resumed) for event in events)
    yield "skipped_steps", (), sum(isinstance(event, SkippedStep) for event in kept)
    newest: dict[type[Event], Event] = {}
    for event in kept:
        newest[type(event)] = event
    if isinstance(start := newest.get(RunStarted), RunStarted):
        yield "total_steps", (), start.total_steps
    if (saved := newest.get(Checkpoint)) is not None and saved.step is not None:
        yield "checkpoint_step", (), saved.step
    for kind in (Step, Evaluation):
        found = newest.get(kind)
        if found is None:
            continue
        if kind is Step:
            yield "step", (), found.step or 0
        for name, value in scalars_of(found).items():
            metric, _, rank = name.replace("/", "_").partition("_rank_")
            yield metric, (("rank", rank),) if rank else (), value
    if isinstance(ranks := newest.get(Ranks), Ranks):
        yield from _metrics_of_ranks(ranks)


def _metrics_of_ranks(event: Ranks) -> Iterable[tuple[str, _Labels, float]]:
    for rank, seconds in enumerate(event.own_seconds):
        yield "rank_own_seconds", (("rank", str(rank)),), seconds
        yield "rank_step_seconds", (("rank", str(rank)),), event.step_seconds[rank]
    for cut, row in event.wait_seconds.items():
        for rank, seconds in enumerate(row):
            yield "rank_wait_seconds", (("rank", str(rank)), ("cut", cut)), seconds
    for rank, degrees in enumerate(event.temperature_celsius or ()):
        yield "rank_temperature_celsius", (("rank", str(rank)),), degrees


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _write(value: float) -> str:
    """Prometheus writes what is not finite as NaN, +Inf and -Inf."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return f"{value:.10g}"
