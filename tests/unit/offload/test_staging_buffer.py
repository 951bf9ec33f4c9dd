"""Staging buffers: one part is filled or written while another is copied."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.offload.staging_buffer import StagingBuffer
from shardwright.offload.state_buckets import PAGE_BYTES


class SlowBuffer(StagingBuffer):
    """Buffer of two parts of a page; a copy waits for an event, then for a time."""

    def __init__(self) -> None:
        super().__init__(2 * PAGE_BYTES, torch.device("cpu"), "test")
        self.may_copy = Event()
        self.has_copied = Event()
        self.num_copies = 0

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]], ready: Any) -> None:
        assert self.may_copy.wait(20)
        time.sleep(0.005)
        super()._copy(pairs, ready)
        self.num_copies += 1
        if self.num_copies == 2:
            self.has_copied.set()


@pytest.fixture
def buffer() -> Iterator[SlowBuffer]:
    """Buffer whose thread ends with the test."""
    buffer = SlowBuffer()
    yield buffer
    buffer.may_copy.set()
    buffer.close()


def test_a_part_is_filled_while_another_is_copied(buffer: SlowBuffer) -> None:
    target = torch.zeros(7 * PAGE_BYTES, dtype=torch.uint8)

    def fill(number: int, part: Tensor) -> None:
        if number == 1:
            buffer.may_copy.set()  # so the copy of the first part has not ended
        part.fill_(number)

    pieces = enumerate(target.split(PAGE_BYTES))
    buffer.read(
        (
            (lambda part, number=number: fill(number, part), [(0, piece)])
            for number, piece in pieces
        ),
        None,
    )
    assert torch.equal(target, torch.arange(7, dtype=torch.uint8).repeat_interleave(PAGE_BYTES))


def test_a_part_is_written_while_another_is_copied(buffer: SlowBuffer) -> None:
    data = torch.randint(0, 256, (7 * PAGE_BYTES + 5,), dtype=torch.uint8)
    written = torch.zeros(8 * PAGE_BYTES, dtype=torch.uint8)
    buffer.may_copy.set()

    def write(pages: Tensor, start: int) -> None:
        assert buffer.has_copied.wait(20)  # so the second part is copied before the first ends
        written[start : start + pages.numel()].copy_(pages)

    buffer.write(data, write, None)
    assert torch.equal(written[: data.numel()], data)


def test_a_failing_disk_ends_a_transfer_after_its_copies(buffer: SlowBuffer) -> None:
    memory = torch.zeros(2 * PAGE_BYTES, dtype=torch.uint8)

    def fail(*_: Any) -> None:
        buffer.may_copy.set()
        raise OSError("the disk fails")

    with pytest.raises(OSError, match="the disk fails"):
        buffer.read([(lambda _: None, [(0, memory[:PAGE_BYTES])]), (fail, [])], None)
    assert buffer.num_copies == 1
    buffer.may_copy.set()
    with pytest.raises(OSError, match="the disk fails"):
        buffer.write(memory, fail, None)
    assert buffer.num_copies == 3
