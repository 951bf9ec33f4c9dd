"""Terminal drawing of a simulated schedule: a row per rank, a column per unit of time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.schedule.actions import ACTION_KINDS
from shardwright.schedule.simulation import Timeline

if TYPE_CHECKING:
    from rich.text import Text

_COLOURS: dict[str, tuple[str, str]] = {
    "F": ("#9ecbff", "#5fa8f0"),
    "B": ("#8fdcb0", "#4fbf85"),
    "I": ("#b9ecc9", "#7fd6a2"),
    "W": ("#ffd98a", "#eebb4d"),
}
"""Per kind: colours of a rank's odd and even stages (first, third, ...

and second, fourth, ...). Black text is readable on all.
"""

_MAX_COLUMNS_PER_ACTION = 24
"""A column is at least this fraction of an action's mean time; shorter actions share one."""


def draw_terminal(timeline: Timeline, width: int = 100) -> Text:
    """Draw a schedule as coloured text, `width` characters wide; longer rows continue below.

    An action shows its letter and micro-batch as far as its columns allow: `F3`, `B3`; a dot is
    idle time.
    """
    from rich.text import Text

    schedule = timeline.schedule
    unit = _choose_unit(timeline)
    cell = 1 + len(str(schedule.num_micro_batches - 1))
    label = f"rank {schedule.num_ranks - 1} "
    rows = [_draw_row(timeline, rank, unit, cell) for rank in range(schedule.num_ranks)]
    length = max(len(row) for row in rows)
    columns_per_block = max(cell, (width - len(label)) // cell * cell)
    drawn = Text()
    for first in range(0, length, columns_per_block):
        if first:
            drawn.append("\n")
        for rank, row in enumerate(rows):
            drawn.append(f"rank {rank} ".ljust(len(label)))
            for character, style in row[first : first + columns_per_block]:
                drawn.append(character, style=style)
            drawn.append("\n")
    for kind in ACTION_KINDS:
        if any(action.kind == kind for row in schedule.rows for action in row):
            drawn.append(" ").append(f" {kind} ", style=f"black on {_COLOURS[kind][0]}").append(
                f" {ACTION_KINDS[kind]} "
            )
    if schedule.num_stages > schedule.num_ranks:
        drawn.append("  darker: a rank's second, fourth, ... stage")
    return drawn.append(f"\n  a column is {unit:g} units of time\n" if unit != 1 else "\n")


def _draw_row(timeline: Timeline, rank: int, unit: float, cell: int) -> list[tuple[str, str]]:
    """Draw one rank as characters with their styles."""
    drawn: list[tuple[str, str]] = []
    shades = {stage: number % 2 for number, stage in enumerate(timeline.schedule.stages_of(rank))}
    for action, start, end in zip(
        timeline.schedule.rows[rank], timeline.starts[rank], timeline.ends[rank], strict=True
    ):
        first = round(start / unit) * cell
        last = round(end / unit) * cell
        drawn += [("·", "dim")] * (first - len(drawn))
        width = last - len(drawn)
        style = f"black on {_COLOURS[action.kind][shades[action.stage]]}"
        drawn += [
            (character, style)
            for character in f"{action.kind}{action.micro_batch}".ljust(width)[:width]
        ]
    return drawn + [("·", "dim")] * (round(timeline.step_seconds / unit) * cell - len(drawn))


def _choose_unit(timeline: Timeline) -> float:
    """Choose the time of a column: the shortest action, unless it is far shorter than most."""
    durations = [
        e - s
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True)
        for s, e in zip(starts, ends, strict=True)
    ]
    positive = [duration for duration in durations if duration > 0]
    return (
        max(min(positive), sum(positive) / len(positive) / _MAX_COLUMNS_PER_ACTION)
        if positive
        else 1.0
    )
