"""Do the nodes' clocks agree? Each rank's offset from rank 0's, wrong by half of the round trip at most.

Source: Cristian 1989, Probabilistic clock synchronization, Distributed Computing 3.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from shardwright.probe.finding import Finding, graded, name_ranks
from shardwright.units import format_seconds

SECTION = "peers"

_ROUNDS = 6
_LONGEST_SECONDS = 10.0
"""After it rank 0 answers no further rank."""
_WARN_SECONDS, _FAIL_SECONDS = 0.1, 10.0
"""A tenth of a second mixes up the order of events of different nodes; ten make locks and file times of the data cache wrong."""


@dataclass(frozen=True)
class Offset:
    """Seconds that this rank's clock is ahead of rank 0's, give or take `error_seconds`."""

    seconds: float
    error_seconds: float


def estimate_offset(store: dist.Store, rank: int, world_size: int, *, clock: Callable[[], float] = time.time) -> Offset | None:
    """Ask rank 0 for the time, some rounds, of which the shortest counts.

    None on rank 0, which answers in order of rank, and on ranks whose turn would come too late.
    """
    if rank == 0:
        began = time.perf_counter()
        for other in range(1, world_size):
            is_late = time.perf_counter() - began > _LONGEST_SECONDS
            store.set(f"clock/{other}/turn", "late" if is_late else "now")
            for number in range(0 if is_late else _ROUNDS):
                store.wait([f"clock/{other}/{number}/asked"])
                store.set(f"clock/{other}/{number}/told", repr(clock()))
        return None
    best: Offset | None = None
    if store.get(f"clock/{rank}/turn") == b"late":
        return None
    for number in range(_ROUNDS):
        before, tick = clock(), time.perf_counter()
        store.set(f"clock/{rank}/{number}/asked", "1")
        told = float(store.get(f"clock/{rank}/{number}/told"))
        trip = time.perf_counter() - tick
        offset = Offset(before + trip / 2 - told, trip / 2)
        if best is None or offset.error_seconds < best.error_seconds:
            best = offset
    return best


def judge_clocks(offsets: Mapping[int, Offset], hosts: Mapping[int, str]) -> list[Finding]:
    """Judge offsets by rank; one within the error of its estimate is none. `hosts` has every rank."""
    if not offsets:
        return []
    sure = {rank: max(0.0, abs(offset.seconds) - offset.error_seconds) for rank, offset in offsets.items()}
    far = {rank: seconds for rank, seconds in sure.items() if seconds > _WARN_SECONDS}
    numbers = {"offset_seconds": {rank: offset.seconds for rank, offset in offsets.items()}}
    if not far:
        rank = max(offsets, key=lambda number: sure[number])
        error = max(offset.error_seconds for offset in offsets.values())
        told = f"within {format_seconds(max(sure[rank], error))} of rank 0's"
        if len(offsets) < len(hosts) - 1:
            told += f" on {len(offsets)} of {len(hosts) - 1} ranks, all that answered in {_LONGEST_SECONDS:g} s"
        return [Finding(SECTION, "clocks", "pass", told, numbers=numbers)]
    rank = max(far, key=lambda number: far[number])
    ahead = "ahead of" if offsets[rank].seconds > 0 else "behind"
    told = f"{name_ranks(far)}: {hosts[rank]}'s clock is {format_seconds(abs(offsets[rank].seconds))} {ahead} rank 0's"
    verdict = graded(1 / far[rank], warn=1 / _WARN_SECONDS, fail=1 / _FAIL_SECONDS)
    return [
        Finding(
            SECTION, "clocks", verdict, told, f"Synchronise {hosts[rank]}: chronyc tracking, systemctl restart chronyd", numbers
        )
    ]
