"""Clock synchronisation: the offset of each rank's clock from rank 0's, over a store.

Source: Cristian 1989, Probabilistic clock synchronization, Distributed Computing 3.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

_NUM_ROUNDS = 8
"""Clock readings per offset; the one with the shortest round trip is used."""


@dataclass(frozen=True)
class ClockOffset:
    """Seconds by which this rank's clock is ahead of rank 0's, within `error_seconds`."""

    seconds: float = 0.0
    error_seconds: float = 0.0
    """Upper bound of the error: half of the fastest round trip."""


def estimate_clock_offset(
    store: dist.Store,
    rank: int,
    world_size: int,
    *,
    max_seconds: float = math.inf,
    clock: Callable[[], float] = time.time,
) -> ClockOffset | None:
    """Ask rank 0 for the time in several rounds and use the one with the shortest round trip.

    Every rank calls it. Rank 0 answers one rank after another, in a few round trips each. No wait
    is longer than the store's time-out. The keys are deleted, so that a store serves many calls.

    Args:
        max_seconds: time after which rank 0 answers no further rank.

    Returns:
        The offset; None on rank 0, and on ranks that it has no time for.

    Raises:
        dist.DistError: a rank has ended or does not answer within the store's time-out.
    """
    if rank == 0:
        start_seconds = time.perf_counter()
        for other in range(1, world_size):
            is_late = time.perf_counter() - start_seconds > max_seconds
            store.set(f"clock/{other}/turn", "late" if is_late else "now")
            for number in range(0 if is_late else _NUM_ROUNDS):
                store.wait([f"clock/{other}/{number}/request"])
                store.set(f"clock/{other}/{number}/reply", repr(clock()))
                store.delete_key(f"clock/{other}/{number}/request")
        return None
    turn = store.get(f"clock/{rank}/turn")
    store.delete_key(f"clock/{rank}/turn")
    offsets = []
    for number in range(0 if turn == b"late" else _NUM_ROUNDS):
        reply_key = f"clock/{rank}/{number}/reply"
        request_time = clock()
        start_seconds = time.perf_counter()
        store.set(f"clock/{rank}/{number}/request", "1")
        store.wait([reply_key])  # `get` alone would add a second round trip
        half_seconds = (time.perf_counter() - start_seconds) / 2
        rank_0_time = float(store.get(reply_key))
        store.delete_key(reply_key)
        offsets.append(ClockOffset(request_time + half_seconds - rank_0_time, half_seconds))
    return min(offsets, key=lambda offset: offset.error_seconds, default=None)


@dataclass(frozen=True)
class SharedClock:
    """Rank 0's wall clock, computed from this process's `time.perf_counter`, which never jumps."""

    offset_seconds: float
    """Seconds to add to `time.perf_counter()`."""
    error_seconds: float
    """Upper bound of the offset's error in seconds."""

    @classmethod
    def from_wall_clock(cls, offset: ClockOffset) -> SharedClock:
        """Build it from the offset of this machine's wall clock."""
        return cls(_measure_wall_offset() - offset.seconds, offset.error_seconds)

    def to_wall_seconds(self, perf_seconds: float) -> float:
        """Convert a reading of `time.perf_counter` to rank 0's seconds since 1970."""
        return perf_seconds + self.offset_seconds

    @property
    def wall_offset_seconds(self) -> float:
        """Seconds to add to this machine's wall clock to get rank 0's."""
        return self.offset_seconds - _measure_wall_offset()


def _measure_wall_offset() -> float:
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
