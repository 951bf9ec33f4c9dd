"""Timeline of events over wall-clock time as SVG text, with one lane per kind of event."""

from __future__ import annotations

from html import escape

from shardwright.report.axis_scale import AxisScale, find_ticks
from shardwright.report.recorded_run import Run
from shardwright.telemetry.event_log import (
    CheckpointEvent,
    EvaluationEvent,
    Event,
    FailureEvent,
    PreemptionEvent,
    ReshardEvent,
    RestartEvent,
    ResumeEvent,
    RunStartedEvent,
    SkippedStepEvent,
    WarningEvent,
)
from shardwright.telemetry.sinks import describe_event
from shardwright.units import format_seconds

_LANES: tuple[tuple[str, tuple[type[Event], ...], int], ...] = (
    ("evaluations", (EvaluationEvent,), 1),
    ("checkpoints", (CheckpointEvent,), 2),
    ("restarts", (RestartEvent,), 4),
    ("resumes", (ResumeEvent,), 3),
    ("layout changes", (ReshardEvent,), 3),
    ("skipped steps", (SkippedStepEvent,), 4),
    ("warnings", (WarningEvent,), 4),
    ("stops, failures", (PreemptionEvent, FailureEvent), 4),
)
_LANE_PIXELS = 24
_MAX_MARKS_PER_LANE = 300


def list_process_spans(run: Run) -> list[tuple[float, float]]:
    """Return first and last wall-clock second of each process that wrote events, in order.

    A process starts before its first event, by the time of its set-up until then.
    """
    spans: list[tuple[float, float]] = []
    for event in run.log:
        if isinstance(event, RunStartedEvent) or not spans:
            spans.append((event.time - event.elapsed_seconds, event.time))
        elif event.time > spans[-1][1]:
            spans[-1] = (spans[-1][0], event.time)
    return spans


def draw_timeline(run: Run, width: int) -> str:
    """Draw a bar per training process and a lane per kind of event, with tooltips."""
    spans = list_process_spans(run)
    low = spans[0][0]
    high = max(end for _, end in spans)
    high = high if high > low else low + 1.0
    lanes = [lane for lane in _LANES if any(isinstance(event, lane[1]) for event in run.history)]
    left = 104
    right = width - 14
    top = 8
    height = top + _LANE_PIXELS * (len(lanes) + 1) + 38
    x = AxisScale(low, high, left, right)
    out = [f'<text x="0" y="{top + 15}">running</text>']
    for begin, end in spans:
        bar_width = max(2.0, x(end) - x(begin))
        title = f"{format_seconds(end - begin)} of a process"
        out.append(
            f'<rect style="fill:var(--c0)" x="{x(begin):.1f}" '
            f'y="{top + 6}" width="{bar_width:.1f}" height="10" rx="2">'
            f"<title>{title}</title></rect>"
        )
    for row, (name, kinds, colour) in enumerate(lanes, start=1):
        middle = top + _LANE_PIXELS * row + 11
        out.append(
            f'<text x="0" y="{middle + 4}">{name}</text><path '
            f'class="grid" d="M{left} {middle}H{right}"/>'
        )
        events = [event for event in run.history if isinstance(event, kinds)]
        for event in events[:: -(-len(events) // _MAX_MARKS_PER_LANE)]:
            title = escape(describe_event(event))
            out.append(
                f'<circle class="dot f{colour}" cx="{x(event.time):.1f}" '
                f'cy="{middle}" r="4.5"><title>{title}</title></circle>'
            )
    bottom = top + _LANE_PIXELS * (len(lanes) + 1) + 4
    seconds, unit = _choose_time_unit(high - low)
    ticks = find_ticks(0, (high - low) / seconds, max(2, (right - left) // 90))
    for tick in ticks:
        tick_x = x(low + tick * seconds)
        out.append(f'<path class="grid" d="M{tick_x:.1f} {bottom}v4"/>')
        out.append(f'<text x="{tick_x:.1f}" y="{bottom + 17}" text-anchor="middle">{tick:g}</text>')
    out.append(
        f'<text x="{right}" y="{bottom + 31}" text-anchor="end">{unit} since the first start</text>'
    )
    label = f"Timeline: {len(spans)} processes, " + ", ".join(
        f"{sum(isinstance(e, kinds) for e in run.history)} {name}" for name, kinds, _ in lanes
    )
    return (
        f'<svg class="plot" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(label, quote=True)}">{"".join(out)}</svg>'
    )


def _choose_time_unit(seconds: float) -> tuple[float, str]:
    for size, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return size, name
    return 1.0, "seconds"


def list_history(run: Run) -> list[tuple[str, str, str]]:
    """Return the rows of the timeline's table: time since the first start, kind, text."""
    begin = list_process_spans(run)[0][0]
    return [
        (
            format_seconds(max(0.0, event.time - begin)),
            event.kind.replace("_", " "),
            describe_event(event),
        )
        for event in run.history
    ]
