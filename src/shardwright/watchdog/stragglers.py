"""Detection of ranks that are slow by themselves, from their step times without waiting.

All ranks wait for the slowest, so whole step times do not show which one it is. Steps are
grouped in blocks of `slow_steps` / 3. A rank is slow if in three consecutive blocks its own
time was more than `slow_factor` times the median of its peers. Each rank's longest step of a
block is ignored: a single slow step can come from the page cache or other processes. Peers are
the ranks of the same pipeline stage. If every stage has one rank only, a rank is expected to
keep the ratio to the other ranks' time that it had in the first block. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from shardwright.config.run import WatchdogSection
from shardwright.layout import RankGrid

_NUM_BLOCKS = 3
_WARMUP_STEPS = 2
"""First steps of a process, which are ignored: kernels are selected and memory grows."""


def build_straggler_detector(
    section: WatchdogSection, grid: RankGrid, world_size: int
) -> StragglerDetector | None:
    """Build the detector for a layout; None if it is disabled or there is only one rank."""
    if section.slow_factor is None or world_size == 1:
        return None
    peers: dict[int, list[int]] = {}
    for rank in range(world_size):
        peers.setdefault(grid.coordinates(rank)["pp"], []).append(rank)
    return StragglerDetector(section.slow_factor, section.slow_steps, list(peers.values()))


@dataclass
class StragglerDetector:
    """Detector of slow ranks. `observe`, called every step, returns the same on all ranks."""

    slow_factor: float
    window_steps: int
    peers: Sequence[Sequence[int]]
    """Groups of ranks with the same work."""
    _warmup_steps_left: int = _WARMUP_STEPS
    _block: list[Sequence[float]] = field(default_factory=list)
    _num_slow_blocks: dict[int, int] = field(default_factory=dict)
    _shares: dict[int, float] = field(default_factory=dict)
    _reported: set[int] = field(default_factory=set)

    def observe(self, own_seconds: Sequence[float]) -> str | None:
        """Add a step; return a message when a rank becomes slow or is no longer slow."""
        if self._warmup_steps_left:
            self._warmup_steps_left -= 1
            return None
        self._block.append(own_seconds)
        if len(self._block) < self.window_steps // _NUM_BLOCKS:
            return None
        totals = [
            sum(sorted(step[rank] for step in self._block)[:-1]) for rank in range(len(own_seconds))
        ]
        self._block.clear()
        expected = self._compute_expected_seconds(totals)
        messages = []
        for rank, seconds in enumerate(totals):
            is_slow = expected[rank] > 0 and seconds > self.slow_factor * expected[rank]
            self._num_slow_blocks[rank] = self._num_slow_blocks.get(rank, 0) + 1 if is_slow else 0
            if self._num_slow_blocks[rank] >= _NUM_BLOCKS and rank not in self._reported:
                self._reported.add(rank)
                ratio = seconds / expected[rank]
                step_seconds = seconds / (self.window_steps // _NUM_BLOCKS - 1)
                messages.append(
                    f"rank {rank} is slow: its own work took {ratio:.1f} times that of its peers "
                    f"in the last {self.window_steps} steps ({step_seconds:.3g} s per step)"
                )
            elif rank in self._reported and not is_slow:
                self._reported.discard(rank)
                messages.append(f"rank {rank} is as fast as its peers again")
        return "; ".join(messages) or None

    def _compute_expected_seconds(self, totals: Sequence[float]) -> dict[int, float]:
        """Compute each rank's expected seconds per block, from its peers or its first block."""
        expected = {}
        alone = [ranks[0] for ranks in self.peers if len(ranks) == 1]
        for ranks in self.peers:
            for rank in ranks:
                others = [totals[other] for other in ranks if other != rank]
                if others:
                    expected[rank] = median(others)
        if len(alone) > 1:
            for rank in alone:
                # Median of the other ranks, times this rank's ratio to it in the first block.
                others_seconds = median(totals[other] for other in alone if other != rank)
                share = totals[rank] / others_seconds if others_seconds > 0 else 0.0
                expected[rank] = self._shares.setdefault(rank, share) * others_seconds
        return {rank: expected.get(rank, 0.0) for rank in range(len(totals))}
