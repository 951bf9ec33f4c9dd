"""Reading of parts of stored tensors into tensors in memory.

A part is one read if its bytes are contiguous in the file. Otherwise its runs are read one by one,
or together with the bytes between them if the runs are short. From an object store neighbouring
reads, of several tensors too, are one request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from shardwright.checkpoint.boxes import Box
from shardwright.checkpoint.header import HeaderEntry
from shardwright.checkpoint.local_tensors import DTYPE_NAMES
from shardwright.checkpoint.manifest import DTYPE_BYTES, StoredSlice
from shardwright.checkpoint.storage_path import BLOCK_BYTES, SHORT_RUN_BYTES, ReadableFile
from shardwright.errors import CheckpointError

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, eq=False)
class StoredPart:
    """Part `box` of a stored slice, relative to the slice, and the view of a tensor it fills."""

    stored_slice: StoredSlice
    box: Box
    target: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the part."""
        return self.box.num_elements * self.target.element_size()

    def halve(self) -> Iterator[StoredPart]:
        """Yield two halves along the first dimension of more than one element."""
        for half in self.box.halve():
            target = view_box(self.target, half.rebase(self.box))
            yield StoredPart(self.stored_slice, half, target)


@dataclass(frozen=True)
class BoxRead:
    """Bytes of a file that fill `target`, a view of a tensor."""

    file: ReadableFile
    position: int
    num_bytes: int
    strides: tuple[int, ...]
    """Elements of the file from one element of each dimension of the target to the next."""
    target: torch.Tensor

    @property
    def end(self) -> int:
        """Position after the last byte."""
        return self.position + self.num_bytes

    @torch.no_grad()  # holds for one thread
    def load(self) -> None:
        """Read the bytes into the target, without a copy if it has the order of the file."""
        target = self.target
        is_run = self.num_bytes == target.element_size() * target.numel()
        if is_run and target.device.type == "cpu" and target.is_contiguous():
            _read_into(self.file, self.position, target.view(-1).view(torch.uint8))
        else:
            self.fill(_read_bytes(self.file, self.position, self.num_bytes))

    @torch.no_grad()
    def fill(self, data_N: torch.Tensor) -> None:
        """Copy the bytes `data_N`, which begin at `position`, into the target."""
        item_bytes = self.target.element_size()
        if data_N.storage_offset() % item_bytes:
            data_N = data_N.clone()  # neighbours of another dtype come first
        values = data_N.view(self.target.dtype)
        self.target.copy_(
            values.as_strided(self.target.shape, self.strides, values.storage_offset())
        )


def plan_reads(
    file: ReadableFile, stored: HeaderEntry, box: Box, target: torch.Tensor
) -> Iterator[BoxRead]:
    """Yield the reads that fill `target` from part `box` of a stored slice.

    A read is a contiguous run, or a span of at most a block whose runs are too short for a system
    call or request each. Otherwise the box is halved.
    """
    item = DTYPE_BYTES[stored.dtype]
    shape = stored.shape
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    start = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    span_bytes = item * (
        1 + sum((length - 1) * stride for length, stride in zip(box.lengths, strides, strict=True))
    )
    is_run = span_bytes == item * box.num_elements
    is_direct = is_run and target.device.type == "cpu" and target.is_contiguous()
    limit_bytes = file.request_bytes or (span_bytes if is_direct else BLOCK_BYTES)
    if span_bytes <= limit_bytes and (
        is_run or item * _count_run_elements(shape, box) < SHORT_RUN_BYTES
    ):
        yield BoxRead(file, stored.start_byte + item * start, span_bytes, strides, target)
        return
    for half in box.halve():
        yield from plan_reads(file, stored, half, view_box(target, half.rebase(box)))


def group_reads(reads: Iterable[BoxRead]) -> Iterator[list[BoxRead]]:
    """Yield groups of reads, each for one request: neighbours in a file with short gaps."""
    group: list[BoxRead] = []
    end = 0
    for read in sorted(reads, key=lambda read: (id(read.file), read.position)):
        limit_bytes = read.file.request_bytes or 0
        if group and (
            read.file is not group[0].file
            or read.position - end > SHORT_RUN_BYTES
            or max(end, read.end) - group[0].position > limit_bytes
        ):
            yield group
            group = []
            end = 0
        group.append(read)
        end = max(end, read.end)
    if group:
        yield group


def load_group(group: list[BoxRead]) -> None:
    """Load a group that `group_reads` has made."""
    first = group[0]
    if len(group) == 1:
        first.load()
        return
    data_N = _read_bytes(first.file, first.position, max(r.end for r in group) - first.position)
    for read in group:
        start = read.position - first.position
        read.fill(data_N[start : start + read.num_bytes])


def view_box(values: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the view of a tensor in `box`, whose offsets are relative to the tensor."""
    for dim, (start, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
        values = values.narrow(dim, start, length)
    return values


def _count_run_elements(shape: tuple[int, ...], box: Box) -> int:
    """Return how many elements of the box are contiguous in the file."""
    run = 1
    for length, size in zip(reversed(box.lengths), reversed(shape), strict=True):
        run *= length
        if length != size:
            break
    return run


def _read_bytes(file: ReadableFile, position: int, num_bytes: int) -> torch.Tensor:
    data_N = torch.empty(num_bytes, dtype=torch.uint8)
    _read_into(file, position, data_N)
    return data_N


def _read_into(file: ReadableFile, position: int, data_N: torch.Tensor) -> None:
    """Fill a host tensor of bytes from a file, starting at byte `position`."""
    view = data_N.numpy().data
    while view:
        count = file.read_into(position, view)
        if count == 0:
            raise CheckpointError("a file ended early: it was changed after it was hashed")
        view = view[count:]
        position += count
