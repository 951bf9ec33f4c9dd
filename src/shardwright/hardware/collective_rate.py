"""Measured time of collectives, and its interpolation between message sizes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"
]


@dataclass(frozen=True)
class CollectiveRate:
    """Measured time of one collective over `num_ranks`, `ranks_per_node` of them on each
    node."""

    kind: CollectiveKind
    num_ranks: int
    ranks_per_node: int
    message_bytes: int
    seconds: float
    processor_seconds: float | None = None
    """Seconds in which a CPU rank's processor works for it: copies, sums, the network's protocol.
    It waits for the link in the others. None if unknown."""
    step_seconds: float | None = None
    """Mean seconds of a call between two computations, as in a step: ranks wait for the last one,
    threads wake up, and buffers have left the caches. None if unknown, as on a GPU."""

    @property
    def bus_bytes_per_second(self) -> float:
        """Bytes/s on the slowest link: bus bandwidth as nccl-tests defines it."""
        return self.message_bytes * compute_bus_factor(self.kind, self.num_ranks) / self.seconds


def compute_bus_factor(kind: CollectiveKind, num_ranks: int) -> float:
    """Return the bytes that each rank sends per byte of message (nccl-tests,
    doc/PERFORMANCE.md).

    >>> [compute_bus_factor(kind, 8) for kind in ("all_reduce", "all_gather", "send")]
    [1.75, 0.875, 1.0]
    """
    if kind == "all_reduce":
        return 2 * (num_ranks - 1) / num_ranks
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return (num_ranks - 1) / num_ranks
    return 1.0


def interpolate_seconds(points: list[tuple[int, float]], num_bytes: float) -> float | None:
    """Interpolate seconds between measured sizes. Above the largest size, extrapolate from it and
    the largest size of at most half of it."""
    if not points:
        return None
    points = sorted(points)
    if num_bytes <= points[0][0]:
        return points[0][1]
    for (low, low_seconds), (high, high_seconds) in pairwise(points):
        if num_bytes <= high:
            share = (num_bytes - low) / (high - low)
            return low_seconds + share * (high_seconds - low_seconds)
    largest, seconds = points[-1]
    half, half_seconds = max((point for point in points if point[0] <= largest / 2), default=(0, 0))
    byte_seconds = min(max(0.0, (seconds - half_seconds) / (largest - half)), seconds / largest)
    return seconds + (num_bytes - largest) * byte_seconds
