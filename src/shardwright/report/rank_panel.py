"""Comparison of ranks: own work and waiting time per step, and slow ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.report.bar_chart import Bar, draw_bars
from shardwright.report.downsampling import FloatArray
from shardwright.report.line_chart import GREY, NUM_COLOURS
from shardwright.report.page_shell import Panel, Table
from shardwright.report.recorded_run import Run
from shardwright.telemetry.event_log import RanksEvent
from shardwright.units import format_seconds

SLOW_RANK_FACTOR = 1.1
"""Ranks whose own time exceeds this multiple of the median rank's are marked as slow."""

_MAX_ROWS = 24
_WAIT_TONES = {
    "at work": "c0", "data": "c2", "tensor": "c1", "context": "c3", "expert": "c5",
    "pipeline": "c4", "world": "c6",
}  # fmt: skip


@dataclass(frozen=True)
class RankMedians:
    """Medians in seconds over the steps that record every rank, shape [ranks]."""

    work_seconds: FloatArray
    step_seconds: FloatArray
    wait_seconds: dict[str, FloatArray]
    """Waiting time by kind of parallelism, such as `data` or `tensor`."""

    @property
    def slow_ranks(self) -> list[int]:
        """Ranks whose own time is much longer than the median rank's, slowest first."""
        median = float(np.median(self.work_seconds))
        return [
            int(rank)
            for rank in np.argsort(-self.work_seconds)
            if self.work_seconds[rank] > SLOW_RANK_FACTOR * median > 0
        ]


def compute_rank_medians(run: Run) -> RankMedians | None:
    """Compute medians over steps; None if no step records more than one rank.

    The first recorded step compiles and fills caches, so it counts only if it is the only one.
    """
    count = max((len(event.own_seconds) for event in run.ranks), default=0)
    events = [event for event in run.ranks if len(event.own_seconds) == count]
    events = events[1:] or events
    if count < 2:
        return None

    def compute_medians(values: Callable[[RanksEvent], Sequence[float] | None]) -> FloatArray:
        rows = [row if (row := values(event)) is not None else (0.0,) * count for event in events]
        return np.asarray(np.median(np.array(rows, dtype=np.float64), axis=0))

    axes = dict.fromkeys(axis for event in events for axis in event.wait_seconds)
    waits = {
        axis: compute_medians(
            lambda event, axis=axis: event.wait_seconds.get(axis)  # type: ignore[misc]
        )
        for axis in axes
    }
    own = compute_medians(lambda event: event.own_seconds)
    return RankMedians(own, compute_medians(lambda event: event.step_seconds), waits)


def _choose_shown_ranks(num_ranks: int, slow: Sequence[int]) -> list[int]:
    """Return all ranks; of too many for a picture, slow ones and some to compare with."""
    if num_ranks <= _MAX_ROWS:
        return list(range(num_ranks))
    num_others = _MAX_ROWS - min(len(slow), _MAX_ROWS // 2)
    others = np.linspace(0, num_ranks - 1, num_others).round().astype(int).tolist()
    return sorted({*slow[: _MAX_ROWS // 2], *others})


def build_rank_panel(run: Run, key: str, title: str) -> Panel | None:
    """Build the panel with a bar of work and waiting time per rank; slow ranks are marked."""
    times = compute_rank_medians(run)
    if times is None:
        return None
    slow = times.slow_ranks
    median = float(np.median(times.work_seconds))
    shown = _choose_shown_ranks(len(times.work_seconds), slow)
    bars = []
    for rank in shown:
        parts = [
            ("at work", float(times.work_seconds[rank])),
            *((axis, float(row[rank])) for axis, row in times.wait_seconds.items()),
        ]
        mark = f"slow: {times.work_seconds[rank] / median:.2f} x" if rank in slow else ""
        bars.append(Bar(f"rank {rank}", tuple((name, 1000 * value) for name, value in parts), mark))
    note = (
        "Median step of each rank: own work, and waiting for other ranks by kind of parallelism. "
    )
    subject = (
        f"Ranks {', '.join(map(str, slow[:6]))} are"
        if len(slow) > 1
        else f"Rank {slow[0]} is"
        if slow
        else "No rank is"
    )
    note += (
        f"{subject} more than {SLOW_RANK_FACTOR - 1:.0%} slower than the median "
        f"rank in own work{'; other ranks wait' if slow else ''}."
    )
    if len(shown) < len(times.work_seconds):
        note += f" {len(shown)} of {len(times.work_seconds)} ranks; the table has all."
    pictures = draw_bars(
        bars,
        unit="ms per step",
        format_value=lambda value: format_seconds(value / 1000),
        tones=_WAIT_TONES,
        description=f"{title}: {note}",
    )
    columns = (
        "rank",
        "step, ms",
        "at work, ms",
        "work / median",
        *(f"waiting for {axis}, ms" for axis in times.wait_seconds),
    )
    rows = tuple(
        (
            f"{rank}{' (slow)' if rank in slow else ''}",
            f"{1000 * times.step_seconds[rank]:.3f}",
            f"{1000 * times.work_seconds[rank]:.3f}",
            f"{times.work_seconds[rank] / median:.2f}" if median > 0 else "",
            *(f"{1000 * row[rank]:.3f}" for row in times.wait_seconds.values()),
        )
        for rank in range(len(times.work_seconds))
    )
    return Panel(key, title, note, pictures, Table(columns, rows))


def find_wait_colour(axis: str) -> int:
    """Return the palette index for a kind of parallelism, the same in all charts of waits."""
    number = int(_WAIT_TONES.get(axis, "c6").removeprefix("c"))
    return GREY if number == NUM_COLOURS else number


def compute_mean_waits(run: Run) -> dict[str, FloatArray]:
    """Compute mean waiting seconds over ranks by parallelism, at the steps of `run.ranks`."""
    axes = dict.fromkeys(axis for event in run.ranks for axis in event.wait_seconds)
    return {
        axis: np.array(
            [
                float(np.mean(event.wait_seconds[axis])) if axis in event.wait_seconds else 0.0
                for event in run.ranks
            ]
        )
        for axis in axes
    }
