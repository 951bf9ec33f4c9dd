"""Panels of a pipeline step, measured and simulated with free communication."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean

from shardwright.errors import ScheduleError
from shardwright.report.page_shell import PICTURE_SIZES, Panel, Table
from shardwright.report.recorded_run import Run
from shardwright.schedule import Action, Schedule, Timeline, simulate
from shardwright.schedule.svg_chart import draw_inline_svg
from shardwright.schedule.text_format import parse_schedule
from shardwright.telemetry.event_log import PipelineEvent


def build_pipeline_panels(run: Run, key: str, title: str) -> list[Panel]:
    """Build the panels of the last recorded step, measured and simulated."""
    events = [event for event in run.surviving_events if isinstance(event, PipelineEvent)]
    if not events:
        return []
    event = events[-1]
    try:
        measured = _build_timeline(event)
        ideal = simulate(measured.schedule, _compute_mean_seconds(measured))
    except (
        ScheduleError,
        ValueError,
        KeyError,
    ):  # an edited event file; the rest of the page is still valid
        return []
    factor, unit = (1000.0, "milliseconds") if measured.step_seconds < 1 else (1.0, "seconds")
    until = factor * max(measured.step_seconds, ideal.step_seconds)
    measured_note = (
        f"Step {event.step:,}, {measured.schedule}. Ranks "
        f"computed {measured.utilisation:.1%} of the time. "
        f"Bubble: {measured.bubble_fraction:.1%} of the compute time. Clocks "
        f"agree within {1e6 * event.clock_error_seconds:.0f} µs."
    )
    ideal_note = (
        "Simulation with mean times by stage and kind of action, and free communication: "
        "the idle time of the schedule itself. Bubble: "
        f"{ideal.bubble_fraction:.1%} of the compute time. "
        f"Step time: {ideal.step_seconds / measured.step_seconds:.0%} of the measured."
    )
    panels = []
    for name, timeline, label, note in (
        ("ran", measured, "measured", measured_note),
        ("ideal", ideal, "simulated", ideal_note),
    ):
        scaled = _scale_timeline(timeline, factor)
        pictures = {
            size: draw_inline_svg(scaled, width, until=until, unit=unit)
            for size, (width, _) in PICTURE_SIZES.items()
        }
        table = _build_timeline_table(timeline, event.ranks)
        panels.append(
            Panel(f"{key}-{name}", f"{title}, {label}", note, pictures, table, is_wide=True)
        )
    return panels


def _build_timeline(event: PipelineEvent) -> Timeline:
    text = "\n".join(",".join(row) for row in event.actions)
    schedule = Schedule(event.schedule, parse_schedule(text, event.schedule).rows)
    if [len(row) for row in schedule.rows] != [len(row) for row in event.begins] or any(
        len(begins) != len(ends) for begins, ends in zip(event.begins, event.ends, strict=True)
    ):
        raise ValueError("every action needs a begin and an end")
    first = min(row[0] for row in event.begins)
    begins, ends = (
        tuple(tuple(instant - first for instant in row) for row in rows)
        for rows in (event.begins, event.ends)
    )
    return Timeline(schedule, begins, ends)


def _compute_mean_seconds(timeline: Timeline) -> Mapping[Action, float]:
    """Return each action's mean seconds over the micro-batches of its stage and kind."""
    times_by_kind: dict[tuple[str, int], list[float]] = {}
    for row, begins, ends in zip(
        timeline.schedule.rows, timeline.starts, timeline.ends, strict=True
    ):
        for action, begin, end in zip(row, begins, ends, strict=True):
            times_by_kind.setdefault((action.kind, action.stage), []).append(end - begin)
    means = {kind: mean(times) for kind, times in times_by_kind.items()}
    return {
        action: means[action.kind, action.stage] for row in timeline.schedule.rows for action in row
    }


def _scale_timeline(timeline: Timeline, factor: float) -> Timeline:
    starts, ends = (
        tuple(tuple(factor * at for at in row) for row in rows)
        for rows in (timeline.starts, timeline.ends)
    )
    return Timeline(timeline.schedule, starts, ends)


def _build_timeline_table(timeline: Timeline, ranks: tuple[int, ...]) -> Table:
    step = timeline.step_seconds
    rows = []
    for position, busy in enumerate(timeline.busy_seconds):
        rank = str(ranks[position]) if position < len(ranks) else ""
        stages = " ".join(map(str, timeline.schedule.stages_of(position)))
        rows.append(
            (
                rank,
                stages,
                f"{1000 * busy:.3f}",
                f"{1000 * (step - busy):.3f}",
                f"{busy / step:.1%}",
            )
        )
    return Table(("rank", "stages", "compute, ms", "idle, ms", "utilisation"), tuple(rows))
