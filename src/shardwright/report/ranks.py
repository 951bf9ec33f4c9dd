"""Ranks against each other: who is slow by itself, who waits for whom, and for what."""

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
"""A rank is marked whose own time is beyond this many times the median rank's."""

_MAX_ROWS = 24
_TONES = {
    "at work": "c0", "data": "c2", "tensor": "c1", "context": "c3", "expert": "c5", "pipeline": "c4", "world": "c6",
}  # fmt: skip


@dataclass(frozen=True)
class RankTimes:
    """Medians over the steps that tell of every rank, in seconds, by rank."""

    own: Floats
    step: Floats
    waits: dict[str, Floats]
    """By cut."""

    @property
    def slow(self) -> list[int]:
        """Ranks whose own time stands out, the slowest first."""
        middle = float(np.median(self.own))
        return [int(rank) for rank in np.argsort(-self.own) if self.own[rank] > SLOW * middle > 0]


def measure_ranks(run: Run) -> RankTimes | None:
    """None where no step tells of more than one rank. The first of them compiles and fills caches: it counts only if alone."""
    count = max((len(event.own_seconds) for event in run.ranks), default=0)
    events = [event for event in run.ranks if len(event.own_seconds) == count]
    events = events[1:] or events
    if count < 2:
        return None

    def middle(values: Callable[[Ranks], Sequence[float] | None]) -> Floats:
        rows = [row if (row := values(event)) is not None else (0.0,) * count for event in events]
        return np.asarray(np.median(np.array(rows, dtype=np.float64), axis=0))

    cuts = dict.fromkeys(cut for event in events for cut in event.wait_seconds)
    waits = {cut: middle(lambda event, cut=cut: event.wait_seconds.get(cut)) for cut in cuts}  # type: ignore[misc]
    return RankTimes(middle(lambda event: event.own_seconds), middle(lambda event: event.step_seconds), waits)


def panel_of_ranks(run: Run, key: str, title: str) -> Panel | None:
    """A bar per rank: at work, and waiting by cut; stragglers are marked."""
    times = measure_ranks(run)
    if times is None:
        return None
    slow = times.slow
    middle = float(np.median(times.own))
    chosen = list(range(len(times.own)))
    if len(chosen) > _MAX_ROWS:  # those that stand out, and some to compare with
        some = np.linspace(0, len(chosen) - 1, _MAX_ROWS - min(len(slow), _MAX_ROWS // 2)).round().astype(int).tolist()
        chosen = sorted({*slow[: _MAX_ROWS // 2], *some})
    bars = []
    for rank in chosen:
        parts = [("at work", float(times.own[rank])), *((cut, float(row[rank])) for cut, row in times.waits.items())]
        mark = f"slow: {times.own[rank] / middle:.2f} x" if rank in slow else ""
        bars.append(Bar(f"rank {rank}", tuple((name, 1000 * value) for name, value in parts), mark))
    note = "Median step of each rank: at work, and waiting for others by what the traffic serves. "
    who = f"Ranks {', '.join(map(str, slow[:6]))} are" if len(slow) > 1 else f"Rank {slow[0]} is" if slow else "No rank is"
    note += f"{who} more than {SLOW - 1:.0%} slower than the median rank by itself{'; the others wait' if slow else ''}."
    if len(chosen) < len(times.own):
        note += f" {len(chosen)} of {len(times.own)} ranks; the table has them all."
    pictures = draw_bars(
        bars, unit="ms per step", write=lambda value: format_seconds(value / 1000), tones=_TONES, description=f"{title}: {note}"
    )
    columns = ("rank", "step, ms", "at work, ms", "of the median", *(f"waits for {cut}, ms" for cut in times.waits))
    rows = tuple(
        (
            f"{rank}{' (slow)' if rank in slow else ''}", f"{1000 * times.step[rank]:.3f}", f"{1000 * times.own[rank]:.3f}",
            f"{times.own[rank] / middle:.2f}" if middle > 0 else "", *(f"{1000 * row[rank]:.3f}" for row in times.waits.values()),
        )
        for rank in range(len(times.own))
    )  # fmt: skip
    return Panel(key, title, note, pictures, Table(columns, rows))


def colour_of_cut(cut: str) -> int:
    """The palette's entry of a cut: the same wherever waits are drawn."""
    number = int(_TONES.get(cut, "c6").removeprefix("c"))
    return GREY if number == NUM_COLOURS else number


def waits_over_steps(run: Run) -> dict[str, Floats]:
    """Mean over ranks of the time waited, by cut, at the steps of `run.ranks`; seconds."""
    cuts = dict.fromkeys(cut for event in run.ranks for cut in event.wait_seconds)
    return {
        cut: np.array([float(np.mean(event.wait_seconds[cut])) if cut in event.wait_seconds else 0.0 for event in run.ranks])
        for cut in cuts
    }
