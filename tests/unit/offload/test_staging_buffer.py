"""Staging buffers: several parts are read, copied or written at the same time."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.checkpoint.disk import LOCAL_DISK
from shardwright.offload.staging_buffer import StagingBuffer
from shardwright.offload.state_buckets import PAGE_BYTES


class SlowBuffer(StagingBuffer):
    """Buffer of four parts of a page; a copy waits for an event, then for a time."""

    def __init__(self) -> None:
        super().__init__(PAGE_BYTES, torch.device("cpu"), "test")
        self.may_copy = Event()
        self.num_copies = 0

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]], ready: Any) -> None:
        assert self.may_copy.wait(20)
        time.sleep(0.005)
        super()._copy(pairs, ready)
        self.num_copies += 1


@pytest.fixture
def buffer() -> Iterator[SlowBuffer]:
    """Buffer whose threads end with the test."""
    buffer = SlowBuffer()
    yield buffer
    buffer.may_copy.set()
    buffer.close()


def test_four_parts_are_filled_at_once_and_before_a_copy_ends(buffer: SlowBuffer) -> None:
    target = torch.zeros(8 * PAGE_BYTES, dtype=torch.uint8)
    together = Barrier(4, buffer.may_copy.set)

    def fill(number: int, part: Tensor) -> None:
        together.wait(20)
        part.fill_(number)

    pieces = enumerate(target.split(PAGE_BYTES))
    buffer.read(((partial(fill, number), [(0, piece)]) for number, piece in pieces), None)
    assert torch.equal(target, torch.arange(8, dtype=torch.uint8).repeat_interleave(PAGE_BYTES))


def test_four_parts_are_written_at_once(buffer: SlowBuffer) -> None:
    data = torch.randint(0, 256, (7 * PAGE_BYTES + 5,), dtype=torch.uint8)
    written = torch.zeros(8 * PAGE_BYTES, dtype=torch.uint8)
    together = Barrier(4)
    buffer.may_copy.set()

    def write(pages: Tensor, start: int) -> None:
        together.wait(20)
        written[start : start + pages.numel()].copy_(pages)

    buffer.write(data, write, None)
    assert torch.equal(written[: data.numel()], data)


def test_requests_that_direct_io_rejects_at_once_are_repeated_without_it(
    buffer: SlowBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(4)) * PAGE_BYTES)
    descriptor = os.open(path, os.O_RDONLY)
    LOCAL_DISK.bypass_cache(descriptor, True)
    together = Barrier(4)
    preadv = os.preadv

    def reject(descriptor: int, data: list[memoryview], position: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0):
            together.wait(20)
            raise OSError(errno.EINVAL, "not aligned")
        return preadv(descriptor, data, position)

    monkeypatch.setattr(os, "preadv", reject)
    target = torch.zeros(4 * PAGE_BYTES, dtype=torch.uint8)

    def fill(start: int, part: Tensor) -> None:
        LOCAL_DISK.read_at(descriptor, part.numpy().data, start)

    buffer.may_copy.set()
    starts = range(0, 4 * PAGE_BYTES, PAGE_BYTES)
    buffer.read(((partial(fill, at), [(0, target[at : at + PAGE_BYTES])]) for at in starts), None)
    assert target.numpy().tobytes() == path.read_bytes()
    os.close(descriptor)


def test_a_failing_disk_ends_a_transfer_after_its_copies(buffer: SlowBuffer) -> None:
    memory = torch.zeros(40 * PAGE_BYTES, dtype=torch.uint8)

    def fail(*_: Any) -> None:
        buffer.may_copy.set()
        raise OSError("the disk fails")

    steps = [(fail if number == 1 else len, [(0, memory[:PAGE_BYTES])]) for number in range(400)]
    with pytest.raises(OSError, match="the disk fails"):
        buffer.read(steps, None)
    num_copies = buffer.num_copies
    assert 1 <= num_copies < 390  # those that had begun
    time.sleep(0.02)
    assert buffer.num_copies == num_copies
    with pytest.raises(OSError, match="the disk fails"):
        buffer.write(memory, fail, None)
    assert len(buffer._free) == 4
