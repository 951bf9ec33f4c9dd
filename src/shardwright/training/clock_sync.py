"""Clock synchronisation: the offset of each rank's clock from rank 0's."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

_NUM_ROUNDS = 8
"""Clock readings per offset; the one with the shortest round trip is used."""


@dataclass(frozen=True)
class SharedClock:
    """Rank 0's wall clock, computed from this process's `time.perf_counter`."""

    offset_seconds: float
    """Seconds to add to `time.perf_counter()`."""
    error_seconds: float = 0.0
    """Upper bound of the offset's error in seconds: half of the fastest round trip."""

    def to_wall_seconds(self, perf_seconds: float) -> float:
        """Convert a reading of `time.perf_counter` to rank 0's seconds since 1970."""
        return perf_seconds + self.offset_seconds

    @property
    def wall_offset_seconds(self) -> float:
        """Seconds to add to this machine's wall clock to get rank 0's."""
        return self.offset_seconds - measure_offset_seconds()


def measure_offset_seconds() -> float:
    """Measure this machine's wall clock minus the performance counter, in seconds.

    Of several readings, the one that took the least time is used.
    """
    readings = []
    for _ in range(_NUM_ROUNDS):
        before = time.perf_counter()
        wall = time.time()
        after = time.perf_counter()
        readings.append((after - before, wall - (before + after) / 2))
    return min(readings)[1]


def synchronise_clock(
    rank: int, world_size: int, group: dist.ProcessGroup | None = None
) -> SharedClock:
    """Measure this rank's offset from rank 0's clock. Collective: every rank calls it.

    Takes a few round trips per rank, one rank after another. Rank 0 is assumed to have read its
    clock half-way between request and reply, which is wrong by at most half of the round trip
    (Cristian 1989, Probabilistic clock synchronization).

    Args:
        group: gloo group of all ranks; None for the default group.
    """
    if world_size == 1:
        return SharedClock(measure_offset_seconds())
    now = torch.zeros(1, dtype=torch.float64)
    if rank == 0:
        for other in range(1, world_size):
            for _ in range(_NUM_ROUNDS):
                dist.recv(now, other, group=group)
                now[0] = time.time()
                dist.send(now, other, group=group)
        return SharedClock(measure_offset_seconds())
    best_seconds = float("inf")
    offset = 0.0
    for _ in range(_NUM_ROUNDS):
        sent = time.perf_counter()
        dist.send(now, 0, group=group)
        dist.recv(now, 0, group=group)
        received = time.perf_counter()
        if received - sent < best_seconds:
            best_seconds = received - sent
            offset = float(now) - (sent + received) / 2
    return SharedClock(offset, best_seconds / 2)
