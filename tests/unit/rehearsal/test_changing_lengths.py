"""Memory that CUDA's allocator reserves for rows of changing lengths.

A step of Llama 3.2 1B, reduced to two layers, is rehearsed once per length. Its allocations and
frees are then replayed many times, in random order, in a simulated allocator.
"""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass
from typing import Any

import pytest
from benchmarks.shapes import SHAPES
from tests.caching_allocator import LARGE_PAGE_BYTES, CachingAllocator

from shardwright.architecture import read_recipe_shape
from shardwright.config.recipe_loading import validate_recipe
from shardwright.layout import Layout
from shardwright.plans import BatchPlan, build_plan
from shardwright.rehearsal import rank_rehearsal
from shardwright.rehearsal.live_memory import LiveMemoryTracker

LENGTHS = (1024, 2048, 3072, 4096)
ROWS = 4
NUM_STEPS = 200


@dataclass(frozen=True)
class Trace:
    """Storages of a step: (key, bytes), 0 bytes when it is freed."""

    resident: list[int]
    """Bytes of each weight and moment."""
    events: list[tuple[int, int]]
    """Allocations and frees of the step, gradients included."""


@pytest.fixture(scope="module")
def traces() -> dict[int, Trace]:
    with pytest.MonkeyPatch.context() as patch:
        return {length: record(length, patch) for length in LENGTHS}


def record(length: int, patch: pytest.MonkeyPatch) -> Trace:
    """Rehearse a step in bf16 with rows of a length."""
    trackers: list[LiveMemoryTracker] = []

    class RecordedTracker(LiveMemoryTracker):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            trackers.append(self)

    patch.setattr(rank_rehearsal, "LiveMemoryTracker", RecordedTracker)
    recipe = validate_recipe(
        {
            "model": {"config": SHAPES["llama-3.2-1b"].config | {"num_hidden_layers": 2}},
            "data": {"sources": ["nowhere"]},
            "precision": {"kind": "bf16"},
            "training": {
                "sequence_length": length,
                "micro_batch_size": ROWS,
                "learning_rate": 1e-3,
                "max_steps": 1,
            },
        }
    )
    batch = BatchPlan(length, ROWS, 1, 1)
    plan = build_plan(read_recipe_shape(recipe), Layout(), batch, recipe.precision, "none")
    rank_rehearsal.rehearse_rank(recipe, plan, 0, "cpu")
    gc.collect()
    (tracker,) = trackers
    of_step = {key for key, origin in tracker._origins.items() if origin.kind in ("step", "update")}
    return Trace(
        [size for key, size in tracker._events if size and key not in of_step],
        [event for event in tracker._events if event[0] in of_step],
    )


def list_reserved_bytes(
    traces: dict[int, Trace], lengths: list[int], *, is_expandable: bool
) -> list[int]:
    """Replay steps of these lengths; return the bytes that are reserved after each."""
    allocator = CachingAllocator(is_expandable=is_expandable)
    for size in traces[lengths[0]].resident:
        allocator.allocate(size)
    reserved = []
    for length in lengths:
        blocks = {}
        for key, size in traces[length].events:
            if key in blocks:
                allocator.free(blocks.pop(key))
            if size:
                blocks[key] = allocator.allocate(size)
        for block in blocks.values():
            allocator.free(block)
        reserved.append(allocator.reserved_bytes)
    return reserved


@pytest.mark.long
def test_changing_lengths_reserve_no_more_than_the_worst_one(traces: dict[int, Trace]) -> None:
    """In the expandable segments of a run; fixed ones would reserve more.

    The worst one is not the longest: blocks of 3,072 tokens leave larger gaps than those of 4,096.
    """
    lengths = random.Random(0).choices(LENGTHS, weights=(6, 4, 2, 1), k=NUM_STEPS)
    reserved = list_reserved_bytes(traces, lengths, is_expandable=True)
    of_one_length = [
        list_reserved_bytes(traces, [length] * 3, is_expandable=True)[-1] for length in LENGTHS
    ]
    in_fixed_segments = list_reserved_bytes(traces, lengths, is_expandable=False)
    assert reserved[0] < reserved[-1] == reserved[NUM_STEPS // 2]  # it grows, and then no more
    assert reserved[-1] <= max(of_one_length) + LARGE_PAGE_BYTES
    assert in_fixed_segments[-1] > 1.05 * reserved[-1]
