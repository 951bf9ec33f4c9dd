"""Staging memory: buckets of any size, none over another, in bounded memory."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from shardwright.errors import OffloadFailed
from shardwright.offload.staging_ring import StagedBucket, StagingRing


def test_buckets_never_overlap_and_all_memory_is_used() -> None:
    ring = StagingRing(torch.empty(1000, dtype=torch.uint8))
    choices = random.Random(0)
    staged: list[StagedBucket] = []
    most_bytes = 0
    for _ in range(500):
        num_bytes = choices.randint(1, 300)
        while ring._find(num_bytes) is None:
            # A release may free a later bucket before an earlier one.
            ring.give_back(staged.pop(choices.randrange(min(2, len(staged)))))
        bucket = ring.take(num_bytes)
        assert bucket.memory.numel() == num_bytes
        assert bucket.end <= 1000
        assert all(bucket.end <= other.start or other.end <= bucket.start for other in staged)
        staged.append(bucket)
        most_bytes = max(most_bytes, sum(other.memory.numel() for other in staged))
    assert most_bytes > 900


def test_a_reader_waits_for_memory_and_ends_with_the_store() -> None:
    ring = StagingRing(torch.empty(100, dtype=torch.uint8))
    first = ring.take(60)
    ends: list[int] = []

    def take_twice() -> None:
        ends.append(ring.take(80).end)
        with pytest.raises(OffloadFailed):
            ring.take(80)
        ends.append(0)

    thread = threading.Thread(target=take_twice)
    thread.start()
    thread.join(0.05)
    assert ends == []
    ring.give_back(first)
    while not ends:
        thread.join(0.01)
    ring.close()
    thread.join()
    assert ends == [80, 0]
