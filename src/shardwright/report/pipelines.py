"""The pipeline as it ran, beside what its schedule promises when nothing is waited for but other stages."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean

from shardwright.errors import ScheduleError
from shardwright.report.runs import Run
from shardwright.report.shell import WIDTHS, Panel, Table
from shardwright.schedule import Action, Schedule, Timeline, simulate
from shardwright.schedule.svg import draw_inline
from shardwright.schedule.text import parse_schedule
from shardwright.telemetry.events import PipelineRan


def panels_of_pipeline(run: Run, key: str, title: str) -> list[Panel]:
    """The last step that was drawn, as it ran and as it would run with the same mean times per stage and free messages."""
    events = [event for event in run.survivors if isinstance(event, PipelineRan)]
    if not events:
        return []
    event = events[-1]
    try:
        ran = _timeline_of(event)
        ideal = simulate(ran.schedule, _mean_times(ran))
    except (ScheduleError, ValueError, KeyError):  # a file that somebody has changed; all else of the page is still true
        return []
    factor, unit = (1000.0, "milliseconds") if ran.step_seconds < 1 else (1.0, "seconds")
    until = factor * max(ran.step_seconds, ideal.step_seconds)
    ran_note = (
        f"Step {event.step:,}, {ran.schedule}. Ranks computed {ran.utilisation:.1%} of it, waited {ran.bubble:.1%} of what they "
        f"computed. Clocks agree within {1e6 * event.clock_error_seconds:.0f} µs."
    )
    ideal_note = (
        "The same actions at their mean time by stage and kind, messages for nothing: what the schedule itself leaves empty. "
        f"It waits {ideal.bubble:.1%} of what it computes, and takes {ideal.step_seconds / ran.step_seconds:.0%} of the time."
    )
    panels = []
    for name, timeline, words, note in (("ran", ran, "as it ran", ran_note), ("ideal", ideal, "by its schedule", ideal_note)):
        scaled = _scale(timeline, factor)
        pictures = {size: draw_inline(scaled, width, until=until, unit=unit) for size, (width, _) in WIDTHS.items()}
        table = _table_of(timeline, event.ranks)
        panels.append(Panel(f"{key}-{name}", f"{title}, {words}", note, pictures, table, wide=True))
    return panels


def _timeline_of(event: PipelineRan) -> Timeline:
    text = "\n".join(",".join(row) for row in event.actions)
    schedule = Schedule(event.schedule, parse_schedule(text, event.schedule).rows)
    if [len(row) for row in schedule.rows] != [len(row) for row in event.begins] or any(
        len(begins) != len(ends) for begins, ends in zip(event.begins, event.ends, strict=True)
    ):
        raise ValueError("every action has a beginning and an end")
    first = min(row[0] for row in event.begins)
    begins, ends = (tuple(tuple(instant - first for instant in row) for row in rows) for rows in (event.begins, event.ends))
    return Timeline(schedule, begins, ends)


def _mean_times(ran: Timeline) -> Mapping[Action, float]:
    """Each action's time, the mean over the micro-batches of its stage and kind."""
    of_kind: dict[tuple[str, int], list[float]] = {}
    for row, begins, ends in zip(ran.schedule.rows, ran.starts, ran.ends, strict=True):
        for action, begin, end in zip(row, begins, ends, strict=True):
            of_kind.setdefault((action.kind, action.stage), []).append(end - begin)
    means = {kind: mean(times) for kind, times in of_kind.items()}
    return {action: means[action.kind, action.stage] for row in ran.schedule.rows for action in row}


def _scale(timeline: Timeline, factor: float) -> Timeline:
    starts, ends = (tuple(tuple(factor * at for at in row) for row in rows) for rows in (timeline.starts, timeline.ends))
    return Timeline(timeline.schedule, starts, ends)


def _table_of(timeline: Timeline, ranks: tuple[int, ...]) -> Table:
    step = timeline.step_seconds
    rows = []
    for place, busy in enumerate(timeline.busy_seconds):
        rank = str(ranks[place]) if place < len(ranks) else ""
        stages = " ".join(map(str, timeline.schedule.stages_of(place)))
        rows.append((rank, stages, f"{1000 * busy:.3f}", f"{1000 * (step - busy):.3f}", f"{busy / step:.1%}"))
    return Table(("rank", "stages", "computes, ms", "waits, ms", "share"), tuple(rows))
