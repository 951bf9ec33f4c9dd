"""Offset of each rank's clock from rank 0's, with an error of at most half a round trip.

Source: Cristian 1989, Probabilistic clock synchronization, Distributed Computing 3.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from shardwright.doctor.finding import Finding, format_ranks, grade_share
from shardwright.units import format_seconds

SECTION = "peers"

_NUM_ROUNDS = 6
_MAX_ANSWER_SECONDS = 10.0
"""Time after which rank 0 answers no further rank."""
_WARN_SECONDS = 0.1
_FAIL_SECONDS = 10.0
"""Limits of the offset. 0.1 s confuses the order of events of several nodes.

10 s breaks locks and file times of the data cache.
"""


@dataclass(frozen=True)
class ClockOffset:
    """Seconds by which this rank's clock is ahead of rank 0's, within `error_seconds`."""

    seconds: float
    error_seconds: float


def estimate_clock_offset(
    store: dist.Store, rank: int, world_size: int, *, clock: Callable[[], float] = time.time
) -> ClockOffset | None:
    """Ask rank 0 for the time in several rounds and use the one with the shortest round trip.

    Return None on rank 0, which answers in order of rank, and on ranks that it has no time for.
    """
    if rank == 0:
        start = time.perf_counter()
        for other in range(1, world_size):
            is_late = time.perf_counter() - start > _MAX_ANSWER_SECONDS
            store.set(f"clock/{other}/turn", "late" if is_late else "now")
            for number in range(0 if is_late else _NUM_ROUNDS):
                store.wait([f"clock/{other}/{number}/request"])
                store.set(f"clock/{other}/{number}/reply", repr(clock()))
        return None
    best: ClockOffset | None = None
    if store.get(f"clock/{rank}/turn") == b"late":
        return None
    for number in range(_NUM_ROUNDS):
        request_time = clock()
        round_start = time.perf_counter()
        store.set(f"clock/{rank}/{number}/request", "1")
        rank_0_time = float(store.get(f"clock/{rank}/{number}/reply"))
        round_trip = time.perf_counter() - round_start
        offset = ClockOffset(request_time + round_trip / 2 - rank_0_time, round_trip / 2)
        if best is None or offset.error_seconds < best.error_seconds:
            best = offset
    return best


def judge_clocks(offsets: Mapping[int, ClockOffset], hosts: Mapping[int, str]) -> list[Finding]:
    """Judge offsets by rank, less the errors of their estimates; `hosts` has every rank."""
    if not offsets:
        return []
    certain = {
        rank: max(0.0, abs(offset.seconds) - offset.error_seconds)
        for rank, offset in offsets.items()
    }
    large = {rank: seconds for rank, seconds in certain.items() if seconds > _WARN_SECONDS}
    numbers = {"offset_seconds": {rank: offset.seconds for rank, offset in offsets.items()}}
    if not large:
        rank = max(offsets, key=lambda number: certain[number])
        error = max(offset.error_seconds for offset in offsets.values())
        value = f"within {format_seconds(max(certain[rank], error))} of rank 0's"
        if len(offsets) < len(hosts) - 1:
            value += (
                f" on {len(offsets)} of {len(hosts) - 1} ranks, all that answered within "
                f"{_MAX_ANSWER_SECONDS:g} s"
            )
        return [Finding(SECTION, "clocks", "pass", value, numbers=numbers)]
    rank = max(large, key=lambda number: large[number])
    direction = "ahead of" if offsets[rank].seconds > 0 else "behind"
    offset = format_seconds(abs(offsets[rank].seconds))
    value = f"{format_ranks(large)}: the clock of {hosts[rank]} is {offset} {direction} rank 0's"
    verdict = grade_share(
        1 / large[rank], warn_below=1 / _WARN_SECONDS, fail_below=1 / _FAIL_SECONDS
    )
    remedy = f"Synchronise {hosts[rank]}: chronyc tracking, systemctl restart chronyd"
    return [Finding(SECTION, "clocks", verdict, value, remedy, numbers)]
