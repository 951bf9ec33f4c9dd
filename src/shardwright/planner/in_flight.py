"""Number of activations in flight on each rank of a pipeline schedule.

Uses a formula for each schedule with a name: a search needs hundreds of schedules with
thousands of actions each. `schedule.peak_activations` counts the same on the schedule itself,
and a test compares the two.
"""

from __future__ import annotations

from functools import lru_cache

from shardwright.schedule import count_peak_activations, load_schedule
from shardwright.schedule.registry import PIPELINE_SCHEDULES, count_stages_per_rank


def count_passes_in_flight(
    name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int | None = None
) -> tuple[int, ...]:
    """Return, per rank, the peak number of passes through one stage whose activations are
    saved.

    >>> count_passes_in_flight("1f1b", 4, 8), count_passes_in_flight("zbv", 2, 6)
    ((4, 3, 2, 1), (4, 4))
    """
    if name not in PIPELINE_SCHEDULES or (name == "zbv" and num_micro_batches < 2 * num_ranks):
        # A schedule from a file, or a ZBV schedule without its last micro-batches.
        return _count_scheduled_passes(name, num_ranks, num_micro_batches, virtual_stages)
    ranks = range(num_ranks)
    if name == "gpipe":
        return (num_micro_batches,) * num_ranks
    if name == "1f1b":
        return tuple(min(num_ranks - rank, num_micro_batches) for rank in ranks)
    if name == "zb_h1":
        return tuple(_count_zb_h1_passes(rank, num_ranks, num_micro_batches) for rank in ranks)
    if name == "interleaved_1f1b":
        virtual = count_stages_per_rank(name, virtual_stages)
        warmups = ((virtual - 1) * num_ranks + 2 * (num_ranks - 1 - rank) for rank in ranks)
        return tuple(min(warmup + 1, virtual * num_micro_batches) for warmup in warmups)
    assert name in ("zbv", "dualpipev"), name
    return (2 * num_ranks + (name == "dualpipev"),) * num_ranks


def _count_zb_h1_passes(rank: int, num_ranks: int, num_micro_batches: int) -> int:
    """Count forward passes before the first backward pass, plus one for each deferred weight
    gradient."""
    warmup = min(num_ranks - 1 - rank, num_micro_batches)
    return warmup + min(num_micro_batches - warmup, rank + 1)


@lru_cache(maxsize=512)
def _count_scheduled_passes(
    name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int | None
) -> tuple[int, ...]:
    return count_peak_activations(load_schedule(name, num_ranks, num_micro_batches, virtual_stages))
