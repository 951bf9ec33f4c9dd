"""Division of an optimizer's state into buckets that fit a staging buffer.

A store has *segments*: consecutive bytes, each with whole state tensors. Small parameters of a
bucket share one segment, so they move in one transfer. A parameter whose state exceeds the buffer
is divided by rows into several buckets; each of its state tensors is one segment and stays
contiguous, as checkpoints read it. Parts begin at multiples of a page, which direct I/O
requires. So vectorised kernels treat the same last elements of a tensor one by one as in an
update of the whole, and the bits are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from shardwright.optim.sharded_optimizer import StateSpec, count_elements

PAGE_BYTES = 4096
"""Alignment of transfers: the largest logical block size of common disks."""
_MIN_DEVICE_BUFFERS = 3
"""At any time one is filled, one updated and one emptied."""
_TENSOR_BYTES = 256
"""Alignment of tensors inside a segment, which CUDA's vector loads need."""
_LEAST_REST = 16
"""Part of a bucket that may remain empty rather than divide a parameter: each piece is copied."""


@dataclass(frozen=True)
class StoredTensor:
    """Place of a state tensor in a store."""

    segment: int
    offset_bytes: int
    spec: StateSpec


@dataclass(frozen=True)
class ByteRange:
    """Bytes of a segment that belong to a bucket, and their place in its staging buffer."""

    segment: int
    offset_bytes: int
    num_bytes: int
    buffer_bytes: int
    """Offset in the staging buffer."""


@dataclass(frozen=True)
class PieceView:
    """Place of a piece of one state tensor: range of the bucket, offset in it, shape."""

    range_index: int
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the view of a bucket's ranges, given as one tensor of bytes each."""
        part = parts[self.range_index]
        first = (part.storage_offset() + self.offset_bytes) // self.dtype.itemsize
        return part.view(self.dtype).as_strided(self.shape, self._strides, first)

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        return tuple(count_elements(self.shape[dim + 1 :]) for dim in range(len(self.shape)))


@dataclass(frozen=True)
class BucketPiece:
    """Rows of a parameter in a bucket. `num_rows` is None if the piece is the whole local part."""

    name: str
    views: dict[str, PieceView]
    first_row: int = 0
    num_rows: int | None = None
    row_length: int = 1
    is_last: bool = True
    """True if no later bucket has rows of this parameter."""

    @property
    def first_element(self) -> int | None:
        """Place in the flattened local part; None if the piece is all of it."""
        return None if self.num_rows is None else self.first_row * self.row_length

    def select(self, local: Tensor) -> Tensor:
        """Return this piece of a parameter's local part, a view if that is contiguous."""
        if self.num_rows is None:
            return local
        shape = (-1,) if self.row_length == 1 else (-1, self.row_length)
        return local.reshape(shape)[self.first_row : self.first_row + self.num_rows]

    def get_shape(self, local_shape: torch.Size) -> torch.Size:
        """Return the shape of `select` of a local part of this shape."""
        if self.num_rows is None:
            return local_shape
        rest = () if self.row_length == 1 else (self.row_length,)
        return torch.Size((self.num_rows, *rest))


@dataclass(frozen=True)
class StateBucket:
    """State that is moved and updated together."""

    pieces: tuple[BucketPiece, ...]
    ranges: tuple[ByteRange, ...]

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of its staging buffer."""
        return self.ranges[-1].buffer_bytes + self.ranges[-1].num_bytes


@dataclass(frozen=True)
class OffloadedParameter:
    """Local part of a parameter: elements, elements of a row, and its state tensors."""

    name: str
    num_elements: int
    row_length: int
    state: dict[str, StateSpec]
    is_divisible: bool = True
    unit: int | None = None
    """Blocks whose weights are on the device together; None if the weights are always there."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its state with alignment."""
        return sum(_round_up(spec.num_bytes, _TENSOR_BYTES) for spec in self.state.values())


@dataclass
class StatePartition:
    """All buckets of a rank's state, in the order of its parameters, and the segments."""

    buckets: list[StateBucket] = field(default_factory=list)
    segment_bytes: list[int] = field(default_factory=list)
    tensors: dict[tuple[str, str], StoredTensor] = field(default_factory=dict)
    """Place of every state tensor by parameter and name."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the store."""
        return sum(self.segment_bytes)

    @property
    def max_bucket_bytes(self) -> int:
        """Bytes of a staging buffer for any bucket."""
        return max((bucket.num_bytes for bucket in self.buckets), default=0)

    def count_device_buffers(self, num_bytes: int) -> int:
        """Count the buffers on a device that fit into this many bytes, at least three.

        There are no more than buckets.
        """
        fitting = num_bytes // max(1, self.max_bucket_bytes)
        return min(len(self.buckets), max(_MIN_DEVICE_BUFFERS, fitting))

    def compute_staging_bytes(self, buffer_bytes: int) -> int:
        """Compute the bytes of host memory through which state on disk passes: three buffers.

        Or three buckets, if one is larger: one is read, one updated, one written.
        """
        return min(3 * max(buffer_bytes, self.max_bucket_bytes), self.num_bytes)

    def select_resident_buckets(self, buffer_bytes: int, unit_bytes: int = 0) -> dict[int, int]:
        """Select the buckets that stay in staging memory between updates; return their bytes.

        All others pass through the rest of it: one buffer, or three buckets or one unit if these
        are larger. The buckets that are read ahead come first, so the update of those that stay
        leaves time to write them and to read the next ones.

        Args:
            unit_bytes: State of a module that is updated while another one computes.
        """
        rest_bytes = max(buffer_bytes, 3 * self.max_bucket_bytes, unit_bytes)
        resident_bytes = self.compute_staging_bytes(buffer_bytes) - rest_bytes
        resident: dict[int, int] = {}
        for index, bucket in enumerate(self.buckets):
            rest_bytes -= bucket.num_bytes
            if rest_bytes < 0 and bucket.num_bytes <= resident_bytes:
                resident[index] = bucket.num_bytes
                resident_bytes -= bucket.num_bytes
        return resident


class StepCounts:
    """One step count per piece: optimizers increase the count of each piece that they update."""

    def __init__(self, partition: StatePartition, counts: Mapping[str, Tensor]) -> None:
        """
        Args:
            counts: of each parameter; its first piece has this one, the others have copies.
        """
        self._counts = {
            (piece.name, piece.first_row): counts[piece.name]
            if piece.first_row == 0
            else counts[piece.name].clone()
            for bucket in partition.buckets
            for piece in bucket.pieces
        }

    def __getitem__(self, piece: BucketPiece) -> Tensor:
        return self._counts[piece.name, piece.first_row]

    def copy_first(self) -> None:
        """Give each further piece of a parameter the step count of the first."""
        copies = {
            count: self._counts[name, 0]
            for (name, first_row), count in self._counts.items()
            if first_row
        }
        if copies:
            torch._foreach_copy_(list(copies), list(copies.values()))


def partition_state(
    parameters: Sequence[OffloadedParameter], buffer_bytes: int, *, should_fill: bool = False
) -> StatePartition:
    """Divide the state of a rank's parameters into buckets of about `buffer_bytes`.

    A parameter that cannot be divided may have a larger bucket. No bucket has parameters of two
    units.

    Args:
        should_fill: Divide parameters where a bucket ends, so that buckets have equal sizes.
            Otherwise only those that exceed `buffer_bytes` are divided, and share no bucket.
    """
    partition = StatePartition()
    bucket = _OpenBucket(partition)
    unit: int | None = None
    for parameter in parameters:
        if parameter.unit not in (None, unit):
            bucket.close()
            unit = parameter.unit
        rest_bytes = buffer_bytes - bucket.num_bytes
        fills_rest = should_fill and rest_bytes >= buffer_bytes // _LEAST_REST
        if parameter.num_bytes <= rest_bytes:
            bucket.add(parameter)
        elif parameter.is_divisible and (fills_rest or parameter.num_bytes > buffer_bytes):
            if not fills_rest:
                bucket.close()
            bucket.add_divided(parameter, buffer_bytes)
            if not should_fill:
                bucket.close()
        else:
            bucket.close()
            bucket.add(parameter)
    bucket.close()
    return partition


class _OpenBucket:
    """Bucket that is being filled: whole parameters, and rows of divided ones."""

    def __init__(self, partition: StatePartition) -> None:
        self._partition = partition
        self._pieces: list[BucketPiece] = []
        self._ranges: list[ByteRange] = []
        self._pending: list[OffloadedParameter] = []
        """Parameters that will share the next segment."""

    @property
    def num_bytes(self) -> int:
        """Bytes so far."""
        pending_bytes = sum(parameter.num_bytes for parameter in self._pending)
        return self._count_range_bytes() + pending_bytes

    def add(self, parameter: OffloadedParameter) -> None:
        """Add a whole parameter."""
        self._pending.append(parameter)

    def add_divided(self, parameter: OffloadedParameter, buffer_bytes: int) -> None:
        """Add rows of a parameter up to `buffer_bytes`, and the others to further buckets."""
        num_rows = parameter.num_elements // parameter.row_length
        row_elements = {
            name: count_elements(spec.shape) // num_rows for name, spec in parameter.state.items()
        }
        row_bytes = {
            name: row_elements[name] * spec.dtype.itemsize for name, spec in parameter.state.items()
        }
        # Every piece begins on a page in every state tensor.
        unit = math.lcm(
            *(PAGE_BYTES // math.gcd(PAGE_BYTES, size) for size in row_bytes.values()),
        )
        self._close_segment()
        segments = {name: self._add_segment(parameter, name) for name in parameter.state}
        first_row = 0
        while first_row < num_rows:
            fitting = (buffer_bytes - self.num_bytes) // sum(row_bytes.values()) // unit * unit
            if fitting <= 0 and self._ranges:
                self.close()
                continue
            count = min(max(unit, fitting), num_rows - first_row)
            views = {}
            for name, spec in parameter.state.items():
                width = row_elements[name]
                shape = (count,) if parameter.row_length == 1 else (count, width)
                views[name] = PieceView(len(self._ranges), 0, shape, spec.dtype)
                self._add_range(
                    segments[name], first_row * row_bytes[name], count * row_bytes[name]
                )
            is_last = first_row + count == num_rows
            self._pieces.append(
                BucketPiece(parameter.name, views, first_row, count, parameter.row_length, is_last)
            )
            first_row += count
            if not is_last:
                self.close()

    def close(self) -> None:
        """Add the bucket to the partition, if it is not empty."""
        self._close_segment()
        if self._ranges:
            bucket = StateBucket(tuple(self._pieces), tuple(self._ranges))
            self._partition.buckets.append(bucket)
        self._pieces = []
        self._ranges = []

    def _close_segment(self) -> None:
        """Give the pending parameters a segment."""
        if not self._pending:
            return
        segment = len(self._partition.segment_bytes)
        offset = 0
        for parameter in self._pending:
            views = {}
            for name, spec in parameter.state.items():
                place = StoredTensor(segment, offset, spec)
                self._partition.tensors[parameter.name, name] = place
                views[name] = PieceView(len(self._ranges), offset, spec.shape, spec.dtype)
                offset += _round_up(spec.num_bytes, _TENSOR_BYTES)
            self._pieces.append(BucketPiece(parameter.name, views))
        self._partition.segment_bytes.append(round_to_pages(offset))
        self._add_range(segment, 0, offset)
        self._pending = []

    def _add_segment(self, parameter: OffloadedParameter, name: str) -> int:
        """Add the segment of one state tensor; return its index."""
        spec = parameter.state[name]
        segment = len(self._partition.segment_bytes)
        self._partition.tensors[parameter.name, name] = StoredTensor(segment, 0, spec)
        self._partition.segment_bytes.append(round_to_pages(spec.num_bytes))
        return segment

    def _add_range(self, segment: int, offset_bytes: int, num_bytes: int) -> None:
        """Add the pages of a segment that have these bytes."""
        place = ByteRange(
            segment, offset_bytes, round_to_pages(num_bytes), self._count_range_bytes()
        )
        self._ranges.append(place)

    def _count_range_bytes(self) -> int:
        if not self._ranges:
            return 0
        return self._ranges[-1].buffer_bytes + self._ranges[-1].num_bytes


def round_to_pages(num_bytes: int) -> int:
    """Return the bytes of the whole pages that hold `num_bytes`."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _round_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple
