"""One clock for all ranks: by how much each rank's differs from rank 0's, found by asking it the time."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

_QUESTIONS = 8
"""Per clock; the answer that came back soonest is the one that counts."""


@dataclass(frozen=True)
class SharedClock:
    """Rank 0's wall clock, read off this process's `time.perf_counter`."""

    offset_seconds: float
    """What to add to `time.perf_counter()`."""
    error_seconds: float = 0.0
    """At most; half of the fastest round trip."""

    def at(self, perf_seconds: float) -> float:
        """Rank 0's seconds since 1970 at an instant of this process's performance counter."""
        return perf_seconds + self.offset_seconds

    @property
    def wall_offset_seconds(self) -> float:
        """What to add to this machine's wall clock to have rank 0's."""
        return self.offset_seconds - own_offset()


def own_offset() -> float:
    """This machine's wall clock minus the performance counter, seconds; of some looks the one that nothing came in between of."""
    looks = []
    for _ in range(_QUESTIONS):
        before = time.perf_counter()
        wall = time.time()
        after = time.perf_counter()
        looks.append((after - before, wall - (before + after) / 2))
    return min(looks)[1]


def agree_on_clock(rank: int, world_size: int, group: dist.ProcessGroup | None = None) -> SharedClock:
    """Ask rank 0 the time. Every rank calls this; it takes some round trips per rank, one rank after another.

    The question is taken to have reached rank 0 half-way between its sending and the answer (Cristian 1989, Probabilistic clock
    synchronization), which is wrong by half of the round trip at most.

    Args:
        group: of all ranks, over gloo; None for the default one.
    """
    if world_size == 1:
        return SharedClock(own_offset())
    now = torch.zeros(1, dtype=torch.float64)
    if rank == 0:
        for other in range(1, world_size):
            for _ in range(_QUESTIONS):
                dist.recv(now, other, group=group)
                now[0] = time.time()
                dist.send(now, other, group=group)
        return SharedClock(own_offset())
    best_seconds, offset = float("inf"), 0.0
    for _ in range(_QUESTIONS):
        asked = time.perf_counter()
        dist.send(now, 0, group=group)
        dist.recv(now, 0, group=group)
        answered = time.perf_counter()
        if answered - asked < best_seconds:
            best_seconds, offset = answered - asked, float(now) - (asked + answered) / 2
    return SharedClock(offset, best_seconds / 2)
