"""Names a rank that is slower by itself than the others: from the seconds of its own work, waiting for others left out.

Every rank waits for the slowest, so the whole step says nothing of who it is. Compared are blocks of `slow_steps` / 3 steps: a rank
is slow when in three blocks in a row its own work took `slow_factor` times the median of the ranks with the same work. The longest
step of a rank in each block is left out: a page cache that fills, or a neighbour on the machine, names nobody. The ranks with the
same work are those of the same pipeline stage; where every stage is one rank's alone, a rank is held to the share of the others'
time that its work had in the first block. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from shardwright.config.upkeep import WatchdogSection
from shardwright.layout import RankGrid

_BLOCKS = 3
_LEFT_OUT_STEPS = 2
"""The first steps of a process: kernels are chosen, memory grows."""


def watch_for_slow_ranks(section: WatchdogSection, grid: RankGrid, world_size: int) -> SlowRanks | None:
    """The watch over the ranks of a layout; None where there is nobody to compare with, or nobody asked."""
    if section.slow_factor is None or world_size == 1:
        return None
    peers: dict[int, list[int]] = {}
    for rank in range(world_size):
        peers.setdefault(grid.coordinates(rank)["pp"], []).append(rank)
    return SlowRanks(section.slow_factor, section.slow_steps, list(peers.values()))


@dataclass
class SlowRanks:
    """Watches the own work of all ranks; `observe` once a step gives the same answer on every rank."""

    factor: float
    steps: int
    peers: Sequence[Sequence[int]]
    """Ranks with the same work, group by group."""
    _left_out: int = _LEFT_OUT_STEPS
    _block: list[Sequence[float]] = field(default_factory=list)
    _in_a_row: dict[int, int] = field(default_factory=dict)
    _shares: dict[int, float] = field(default_factory=dict)
    _named: set[int] = field(default_factory=set)

    def observe(self, own_seconds: Sequence[float]) -> str | None:
        """One more step; a sentence when a rank has just been found slow, or when it no longer is."""
        if self._left_out:
            self._left_out -= 1
            return None
        self._block.append(own_seconds)
        if len(self._block) < self.steps // _BLOCKS:
            return None
        totals = [sum(sorted(step[rank] for step in self._block)[:-1]) for rank in range(len(own_seconds))]
        self._block.clear()
        expected = self._expected(totals)
        told = []
        for rank, seconds in enumerate(totals):
            slow = expected[rank] > 0 and seconds > self.factor * expected[rank]
            self._in_a_row[rank] = self._in_a_row.get(rank, 0) + 1 if slow else 0
            if self._in_a_row[rank] >= _BLOCKS and rank not in self._named:
                self._named.add(rank)
                times = seconds / expected[rank]
                told.append(
                    f"rank {rank} is slow: its own work took {times:.1f} times that of its peers in the last {self.steps} steps "
                    f"({seconds / (self.steps // _BLOCKS - 1):.3g} s a step)"
                )
            elif rank in self._named and not slow:
                self._named.discard(rank)
                told.append(f"rank {rank} is as fast as its peers again")
        return "; ".join(told) or None

    def _expected(self, totals: Sequence[float]) -> dict[int, float]:
        """Seconds of a block that each rank's peers, or its own first block, let expect."""
        expected = {}
        alone = [ranks[0] for ranks in self.peers if len(ranks) == 1]
        for ranks in self.peers:
            for rank in ranks:
                others = [totals[other] for other in ranks if other != rank]
                if others:
                    expected[rank] = median(others)
        if len(alone) > 1:
            for rank in alone:
                # The others' pace now, times what this rank's share of it was at first.
                pace = median(totals[other] for other in alone if other != rank)
                expected[rank] = self._shares.setdefault(rank, totals[rank] / pace if pace > 0 else 0.0) * pace
        return {rank: expected.get(rank, 0.0) for rank in range(len(totals))}
