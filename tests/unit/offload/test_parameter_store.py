"""Scratch file of trained weights: which bytes move without a copy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwright.checkpoint.disk import Disk
from shardwright.offload.parameter_store import DiskParameterStore
from shardwright.offload.state_buckets import PAGE_BYTES


class CountingDisk(Disk):
    """Disk that records the length of each transfer."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def read_at(self, descriptor: int, data: memoryview, position: int) -> None:
        self.lengths.append(len(data))
        super().read_at(descriptor, data, position)

    def write_at(self, descriptor: int, data: memoryview, position: int) -> None:
        self.lengths.append(len(data))
        super().write_at(descriptor, data, position)


@pytest.mark.parametrize(
    ("offset", "lengths"),
    [(0, [3 * PAGE_BYTES, PAGE_BYTES]), (64, [PAGE_BYTES, PAGE_BYTES, PAGE_BYTES, PAGE_BYTES])],
)
def test_whole_pages_of_memory_that_begins_on_one_move_at_once(
    tmp_path: Path, offset: int, lengths: list[int]
) -> None:
    disk = CountingDisk()
    store = DiskParameterStore(tmp_path, PAGE_BYTES, torch.device("cpu"), disk=disk)
    size = 3 * PAGE_BYTES + 100
    place = store.add(size)
    values = store.allocate(size + offset)[offset:].random_(0, 256)
    store.write(place, values)()
    target = store.allocate(size + offset)[offset:].zero_()
    store.read(place, target)()
    assert torch.equal(target, values)
    assert disk.lengths == 2 * lengths
    target.untyped_storage().resize_(0)  # the memory of weights is freed so
    store.close()
