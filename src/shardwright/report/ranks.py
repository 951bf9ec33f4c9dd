"""Comparison of ranks: own work and waiting time per step, and slow ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.report.bars import Bar, draw_bars
from shardwright.report.plot import GREY, NUM_COLOURS
from shardwright.report.runs import Run
from shardwright.report.shell import Panel, Table
from shardwright.report.thin import Floats
from shardwright.telemetry.events import Ranks
from shardwright.units import format_seconds

SLOW = 1.1
"""Ranks whose own time exceeds this multiple of the median rank's are marked as slow."""

_MAX_ROWS = 24
_TONES = {
    "at work": "c0", "data": "c2", "tensor": "c1", "context": "c3", "expert": "c5",
    "pipeline": "c4", "world": "c6",
}  # fmt: skip


@dataclass(frozen=True)
class RankTimes:
    """Medians in seconds over the steps that record every rank, shape [ranks]."""

    own: Floats
    step: Floats
    waits: dict[str, Floats]
    """Waiting time by kind of parallelism, such as `data` or `tensor`."""

    @property
    def slow(self) -> list[int]:
        """Ranks whose own time is much longer than the median rank's, slowest first."""
        median = float(np.median(self.own))
        return [int(rank) for rank in np.argsort(-self.own) if self.own[rank] > SLOW * median > 0]


def measure_ranks(run: Run) -> RankTimes | None:
    """Compute medians over steps; None if no step records more than one rank.

    The first recorded step compiles and fills caches, so it counts only if it is the only one.
    """
    count = max((len(event.own_seconds) for event in run.ranks), default=0)
    events = [event for event in run.ranks if len(event.own_seconds) == count]
    events = events[1:] or events
    if count < 2:
        return None

    def compute_medians(values: Callable[[Ranks], Sequence[float] | None]) -> Floats:
        rows = [row if (row := values(event)) is not None else (0.0,) * count for event in events]
        return np.asarray(np.median(np.array(rows, dtype=np.float64), axis=0))

    axes = dict.fromkeys(axis for event in events for axis in event.wait_seconds)
    waits = {axis: compute_medians(lambda event, axis=axis: event.wait_seconds.get(axis)) for axis in axes}  # type: ignore[misc]
    own = compute_medians(lambda event: event.own_seconds)
    return RankTimes(own, compute_medians(lambda event: event.step_seconds), waits)


def panel_of_ranks(run: Run, key: str, title: str) -> Panel | None:
    """Build the panel with a bar of work and waiting time per rank; slow ranks are marked."""
    times = measure_ranks(run)
    if times is None:
        return None
    slow = times.slow
    median = float(np.median(times.own))
    shown = list(range(len(times.own)))
    if len(shown) > _MAX_ROWS:  # slow ranks, and some to compare with
        others = np.linspace(0, len(shown) - 1, _MAX_ROWS - min(len(slow), _MAX_ROWS // 2)).round().astype(int).tolist()
        shown = sorted({*slow[: _MAX_ROWS // 2], *others})
    bars = []
    for rank in shown:
        parts = [("at work", float(times.own[rank])), *((axis, float(row[rank])) for axis, row in times.waits.items())]
        mark = f"slow: {times.own[rank] / median:.2f} x" if rank in slow else ""
        bars.append(Bar(f"rank {rank}", tuple((name, 1000 * value) for name, value in parts), mark))
    note = (
        "Median step of each rank: own work, and "
        "waiting for other ranks by kind of parallelism. "
    )
    subject = f"Ranks {', '.join(map(str, slow[:6]))} are" if len(slow) > 1 else f"Rank {slow[0]} is" if slow else "No rank is"
    note += (
        f"{subject} more than {SLOW - 1:.0%} slower than the median "
        f"rank in own work{'; other ranks wait' if slow else ''}."
    )
    if len(shown) < len(times.own):
        note += f" {len(shown)} of {len(times.own)} ranks; the table has all."
    pictures = draw_bars(
        bars, unit="ms per step", write=lambda value: format_seconds(value / 1000), tones=_TONES, description=f"{title}: {note}"
    )
    columns = ("rank", "step, ms", "at work, ms", "work / median", *(f"waiting for {axis}, ms" for axis in times.waits))
    rows = tuple(
        (
            f"{rank}{' (slow)' if rank in slow else ''}",
            f"{1000 * times.step[rank]:.3f}",
            f"{1000 * times.own[rank]:.3f}",
            f"{times.own[rank] / median:.2f}" if median > 0 else "",
            *(f"{1000 * row[rank]:.3f}" for row in times.waits.values()),
        )
        for rank in range(len(times.own))
    )
    return Panel(key, title, note, pictures, Table(columns, rows))


def colour_of_cut(cut: str) -> int:
    """Return the palette index for a kind of parallelism, the same in all charts of waits."""
    number = int(_TONES.get(cut, "c6").removeprefix("c"))
    return GREY if number == NUM_COLOURS else number


def waits_over_steps(run: Run) -> dict[str, Floats]:
    """Compute mean waiting seconds over ranks by parallelism, at the steps of `run.ranks`."""
    axes = dict.fromkeys(axis for event in run.ranks for axis in event.wait_seconds)
    return {
        axis: np.array([float(np.mean(event.wait_seconds[axis])) if axis in event.wait_seconds else 0.0 for event in run.ranks])
        for axis in axes
    }
