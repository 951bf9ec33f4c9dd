"""Staging memory: buckets of any size, none over another, in bounded memory."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import torch

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
        bucket = ring.take(num_bytes).result(0)
        assert bucket.memory.numel() == num_bytes
        assert bucket.end <= 1000
        assert all(bucket.end <= other.start or other.end <= bucket.start for other in staged)
        staged.append(bucket)
        most_bytes = max(most_bytes, sum(other.memory.numel() for other in staged))
    assert most_bytes > 900


def test_requests_are_served_in_their_order_and_cancelled_at_the_end() -> None:
    ring = StagingRing(torch.empty(100, dtype=torch.uint8))
    first = ring.take(60).result(0)
    second = ring.take(80)
    third = ring.take(10)
    assert not second.done()
    assert not third.done(), "it overtook an earlier request"
    ring.give_back(first)
    assert [second.result(0).end, third.result(0).end] == [80, 90]
    fourth = ring.take(80)
    ring.close()
    assert fourth.cancelled()


def test_a_script_that_fails_during_an_update_ends_without_closing_its_store(
    tmp_path: Path,
) -> None:
    script = f"""
from pathlib import Path
from shardwright.offload.disk_store import DiskStore
from shardwright.offload.state_buckets import ByteRange, StateBucket

store = DiskStore(Path({str(tmp_path)!r}), [8192], capacity_bytes=4096)
for index in range(2):  # the second one needs the memory of the first
    store.swap_in(index, StateBucket((), (ByteRange(0, 4096 * index, 4096, 0),)))
raise ValueError("training failed")
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith("ValueError: training failed\n")
