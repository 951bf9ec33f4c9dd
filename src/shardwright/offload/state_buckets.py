"""Division of an optimizer's state into buckets that fit a staging buffer.

A store has *segments*: consecutive bytes, each with whole state tensors. Small parameters share
a bucket, which is one segment, so it moves in one transfer. A parameter whose state exceeds the
buffer is divided by rows into buckets of its own; each of its state tensors is one segment and
stays contiguous, as checkpoints read it. Parts begin at multiples of a page, which direct I/O
requires. So vectorised kernels treat the same last elements of a tensor one by one as in an
update of the whole, and the bits are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shardwright.optim.sharded_optimizer import StateSpec, count_elements

PAGE_BYTES = 4096
"""Alignment of transfers: the largest logical block size of common disks."""
_MIN_DEVICE_BUFFERS = 3
"""At any time one is filled, one updated and one emptied."""
_TENSOR_BYTES = 256
"""Alignment of tensors inside a segment, which CUDA's vector loads need."""


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
        num_bytes = count_elements(self.shape) * self.dtype.itemsize
        part = parts[self.range_index][self.offset_bytes : self.offset_bytes + num_bytes]
        return part.view(self.dtype).view(self.shape)


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


@dataclass(frozen=True)
class StateBucket:
    """State that is moved and updated together."""

    pieces: tuple[BucketPiece, ...]
    ranges: tuple[ByteRange, ...]

    @property
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


def partition_state(parameters: Sequence[OffloadedParameter], buffer_bytes: int) -> StatePartition:
    """Divide the state of a rank's parameters into buckets of about `buffer_bytes`.

    A parameter that cannot be divided may have a larger bucket. No bucket has parameters of two
    units.
    """
    partition = StatePartition()
    pending: list[OffloadedParameter] = []
    pending_bytes = 0
    unit: int | None = None
    for parameter in parameters:
        has_new_unit = parameter.unit not in (None, unit)
        unit = parameter.unit if has_new_unit else unit
        if pending and (has_new_unit or pending_bytes + parameter.num_bytes > buffer_bytes):
            _add_shared_bucket(partition, pending)
            pending = []
            pending_bytes = 0
        if parameter.is_divisible and parameter.num_bytes > buffer_bytes:
            _add_divided_parameter(partition, parameter, buffer_bytes)
        else:
            pending.append(parameter)
            pending_bytes += parameter.num_bytes
    if pending:
        _add_shared_bucket(partition, pending)
    return partition


def _add_shared_bucket(partition: StatePartition, parameters: Sequence[OffloadedParameter]) -> None:
    segment = len(partition.segment_bytes)
    offset = 0
    pieces = []
    for parameter in parameters:
        views = {}
        for name, spec in parameter.state.items():
            partition.tensors[parameter.name, name] = StoredTensor(segment, offset, spec)
            views[name] = PieceView(0, offset, spec.shape, spec.dtype)
            offset += _round_up(spec.num_bytes, _TENSOR_BYTES)
        pieces.append(BucketPiece(parameter.name, views))
    num_bytes = _round_up(offset, PAGE_BYTES)
    partition.segment_bytes.append(num_bytes)
    partition.buckets.append(StateBucket(tuple(pieces), (ByteRange(segment, 0, num_bytes, 0),)))


def _add_divided_parameter(
    partition: StatePartition, parameter: OffloadedParameter, buffer_bytes: int
) -> None:
    num_rows = parameter.num_elements // parameter.row_length
    row_elements = {
        name: count_elements(spec.shape) // num_rows for name, spec in parameter.state.items()
    }
    row_bytes = {
        name: row_elements[name] * spec.dtype.itemsize for name, spec in parameter.state.items()
    }
    first_segment = len(partition.segment_bytes)
    for index, (name, spec) in enumerate(parameter.state.items()):
        partition.tensors[parameter.name, name] = StoredTensor(first_segment + index, 0, spec)
        partition.segment_bytes.append(_round_up(spec.num_bytes, PAGE_BYTES))
    # Every piece begins on a page in every state tensor.
    unit = math.lcm(
        *(PAGE_BYTES // math.gcd(PAGE_BYTES, size) for size in row_bytes.values()),
    )
    piece_rows = max(unit, buffer_bytes // sum(row_bytes.values()) // unit * unit)
    for first_row in range(0, num_rows, piece_rows):
        count = min(piece_rows, num_rows - first_row)
        views = {}
        ranges: list[ByteRange] = []
        buffer_offset = 0
        for index, (name, spec) in enumerate(parameter.state.items()):
            num_bytes = _round_up(count * row_bytes[name], PAGE_BYTES)
            ranges.append(
                ByteRange(
                    first_segment + index, first_row * row_bytes[name], num_bytes, buffer_offset
                )
            )
            buffer_offset += num_bytes
            width = row_elements[name]
            shape = (count,) if parameter.row_length == 1 else (count, width)
            views[name] = PieceView(index, 0, shape, spec.dtype)
        is_last = first_row + count == num_rows
        piece = BucketPiece(parameter.name, views, first_row, count, parameter.row_length, is_last)
        partition.buckets.append(StateBucket((piece,), tuple(ranges)))


def round_to_pages(num_bytes: int) -> int:
    """Return the bytes of the whole pages that hold `num_bytes`."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _round_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple
