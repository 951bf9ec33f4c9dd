"""Rules of PyTorch's allocator: segments, splits, merges, other streams, and a full device."""

from __future__ import annotations

import pytest

from shardwright.planner.memory.caching_allocator import CachingAllocator

MIB = 1 << 20


@pytest.mark.parametrize(
    ("num_bytes", "reserved_bytes"),
    [(MIB, 0), (MIB + 1, 20 * MIB), (10 * MIB, 10 * MIB), (10 * MIB + 1, 12 * MIB)],
)
def test_a_request_reserves_a_segment_of_its_class(num_bytes: int, reserved_bytes: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(num_bytes)
    assert allocator.reserved_bytes == reserved_bytes


def test_a_free_block_is_split_and_merged_again() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(40 * MIB))
    parts = [allocator.allocate(10 * MIB) for _ in range(4)]
    assert allocator.reserved_bytes == 40 * MIB
    for index in (0, 2, 1):
        allocator.free(parts[index])
    allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.free(parts[3])
    allocator.allocate(12 * MIB)  # not contiguous with the 30 MiB
    assert allocator.reserved_bytes == 52 * MIB


def test_an_allocation_uses_the_smallest_free_block_that_suffices() -> None:
    allocator = CachingAllocator()
    large = allocator.allocate(40 * MIB)
    small = allocator.allocate(20 * MIB)
    allocator.free(large)
    allocator.free(small)
    allocator.allocate(16 * MIB)
    allocator.allocate(40 * MIB)
    assert allocator.reserved_bytes == 60 * MIB


def test_a_block_that_another_stream_reads_is_reusable_when_the_device_has_passed_it() -> None:
    allocator = CachingAllocator(queue_length=10)
    allocator.launch(5)
    allocator.free(allocator.allocate(20 * MIB), is_shared=True)
    allocator.launch(9)
    allocator.free(allocator.allocate(20 * MIB))
    assert allocator.reserved_bytes == 40 * MIB
    allocator.launch(1)  # the device has finished five
    for _ in range(2):
        allocator.allocate(20 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_a_full_device_waits_and_releases_whole_segments() -> None:
    allocator = CachingAllocator(capacity_bytes=60 * MIB, queue_length=1000)
    split = allocator.allocate(20 * MIB)
    allocator.free(split)
    allocator.allocate(12 * MIB)  # its segment is in use
    allocator.launch(1)
    allocator.free(allocator.allocate(30 * MIB), is_shared=True)
    allocator.allocate(40 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
