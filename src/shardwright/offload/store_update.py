"""Update on the host of offloaded weights by their gradients: both are in the store.

In pinned memory they are updated where they are
(docs/decisions/0265-master-weights-in-host-memory.md). On disk they pass through staging memory in
the buckets of the moments: the next ones are read while one is updated, and its weights are written
while the next one is updated (docs/decisions/0281-updates-on-the-host-of-weights-on-disk.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.model.products.working_weights import WorkingWeights
from shardwright.numerics import get_local_tensor
from shardwright.offload.disk_store import allocate_buffer, pass_result
from shardwright.offload.parameter_store import DiskParameterStore, ParameterStore
from shardwright.offload.staging_ring import StagedBucket, StagingRing
from shardwright.offload.state_buckets import BucketPiece, StatePartition, round_to_pages
from shardwright.offload.trained_block import BlockMember, TrainedBlock

FinishPiece = Callable[[str, int, Tensor], None]
"""Called with a weight's name, the first element of an updated piece, and the piece."""


class _Place(NamedTuple):
    """A trained weight of a unit."""

    unit: int
    block: TrainedBlock
    member: BlockMember


class StoreUpdate:
    """Update of weights where they are, in host memory."""

    def __init__(self, store: ParameterStore) -> None:
        self._store = store
        self.working_weights: WorkingWeights | None = None
        """Copies on the device, which are written from updated weights."""
        self.finish_piece: FinishPiece | None = None
        """Called with each piece of an updated weight before it leaves."""
        self.pending_units: set[int] = set()
        """Units that a running update has not reached: their weights are old."""
        self._blocks: Mapping[int, TrainedBlock] = {}
        self._partition = StatePartition()
        self._places: dict[str, _Place] = {}
        self._pieces: dict[int, list[BucketPiece]] = {}
        """Pieces of offloaded weights that the update changes, by bucket."""
        self._ended_units: dict[int, int] = {}
        """Unit whose last bucket each bucket is."""
        self._copied_unit: int | None = None
        """Unit whose weights are on their way to working weights."""

    def prepare(self, blocks: Mapping[int, TrainedBlock], partition: StatePartition) -> None:
        """Prepare for updates of the weights of these units in these buckets."""
        self._blocks = blocks
        self._partition = partition
        self._places = {
            member.name: _Place(unit, block, member)
            for unit, block in blocks.items()
            for member in block.members
        }

    def has_weight(self, name: str) -> bool:
        """Return True if a weight is in the store."""
        return name in self._places

    def count_staging_bytes(self, buffer_bytes: int) -> int:
        """Count the bytes of staging memory for weights on disk.

        A buffer, or weights and gradients of three buckets if these are larger; at most all.
        """
        sizes = [
            sum(
                2 * self._count_bytes(piece)
                for piece in bucket.pieces
                if self.has_weight(piece.name)
            )
            for bucket in self._partition.buckets
        ]
        return min(sum(sizes), max(buffer_bytes, 3 * max(sizes, default=0)))

    def begin(self, order: Sequence[int], names: Collection[str]) -> None:
        """Wait for all gradients, and begin an update of these weights in these buckets."""
        for block in self._blocks.values():
            block.store_gradients(self._store)
            block.release()
        self._store.synchronise()
        self._pieces = {
            index: [
                piece
                for piece in self._partition.buckets[index].pieces
                if piece.name in names and self.has_weight(piece.name)
            ]
            for index in order
        }
        last = {
            self._places[pieces[0].name].unit: index
            for index, pieces in self._pieces.items()
            if pieces
        }
        self._ended_units = {index: unit for unit, index in last.items()}
        self.pending_units.update(last)

    @contextmanager
    def open_bucket(self, index: int) -> Iterator[None]:
        """Let weights and gradients of a bucket be updated in this context (`view`)."""
        self._open(index)
        yield
        if self.finish_piece is not None:
            for piece in self._pieces[index]:
                self.finish_piece(piece.name, piece.first_element or 0, self.view(piece)[0])
        self._close(index)
        unit = self._ended_units.get(index)
        if unit is not None:
            self._end_unit(unit)

    def view(self, piece: BucketPiece) -> tuple[Tensor, Tensor]:
        """Return a piece of a weight, and of its gradient, in host memory."""
        _, block, member = self._places[piece.name]
        return (
            piece.select(member.view(self._store, block.weight_place + member.offset)),
            piece.select(member.view(self._store, block.gradient_place + member.gradient_offset)),
        )

    def end(self) -> None:
        """End an update."""
        self.pending_units.clear()
        self._finish_copies()

    def close(self) -> None:
        """Begin nothing more."""

    def _open(self, index: int) -> None:
        """Wait for weights and gradients of a bucket: they are there."""

    def _close(self, index: int) -> None:
        """Let the updated weights of a bucket leave: they stay."""

    def _end_unit(self, unit: int) -> None:
        """Write the working weights of the unit before, while those of this one arrive."""
        self.pending_units.discard(unit)
        if self.working_weights is None:
            return
        self._bring(unit)
        self._finish_copies()
        self._copied_unit = unit
        self._allocate_next()

    def _bring(self, unit: int) -> None:
        """Start to bring a unit's weights to the device, to be cast to working weights."""
        block = self._blocks[unit]
        assert self.working_weights is not None
        self.working_weights.mark_changed(block.parameters)
        block.launch(self._store)

    def _allocate_next(self) -> None:
        """Allocate the device memory of the next unit: it is allocated when its weights arrive."""

    def _finish_copies(self) -> None:
        """Write the working weights of the unit before, unless a pass has done it."""
        unit, self._copied_unit = self._copied_unit, None
        if unit is None or self.working_weights is None:
            return
        block = self._blocks[unit]
        if not self.working_weights.are_current(block.parameters):
            block.finish()
            self.working_weights.update(block.parameters)
            block.free_weights()

    def _count_bytes(self, piece: BucketPiece) -> int:
        """Count the bytes of the pages of a piece of a weight."""
        member = self._places[piece.name].member
        if piece.num_rows is None:
            return round_to_pages(member.num_bytes)
        itemsize = member.parameter.dtype.itemsize
        return round_to_pages(piece.num_rows * piece.row_length * itemsize)


class _StagedRange(NamedTuple):
    """Pages of a piece in the file, and where they begin in the memory of their bucket."""

    piece: BucketPiece
    positions: tuple[int, int]
    """First byte of the weights, and of the gradient."""
    offsets: tuple[int, int]
    num_bytes: int


class StagedUpdate(StoreUpdate):
    """Update of weights on disk, which pass through staging memory with their gradients.

    With CUDA updated weights are copied from there to the device if they have working weights.
    """

    def __init__(self, store: DiskParameterStore, buffer_bytes: int, device: torch.device) -> None:
        super().__init__(store)
        self._disk_store = store
        self._buffer_bytes = buffer_bytes
        self._device = device
        self._ring: StagingRing | None = None
        self._stream: torch.cuda.Stream | None = None
        self._allocated_event: torch.cuda.Event | None = None
        """Recorded on training's stream when device memory of the next unit was allocated."""
        self._ranges: dict[int, list[_StagedRange]] = {}
        self._arriving: dict[int, Future[StagedBucket]] = {}
        self._opened: StagedBucket | None = None
        self._views: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        """Weights and gradient of the pieces of the open bucket, by name and first row."""

    def prepare(self, blocks: Mapping[int, TrainedBlock], partition: StatePartition) -> None:
        """Prepare for updates of these weights, and allocate the staging memory."""
        super().prepare(blocks, partition)
        # Only copies to the device need pinned memory.
        has_copies = self.working_weights is not None
        num_bytes = self.count_staging_bytes(self._buffer_bytes)
        self._ring = StagingRing(allocate_buffer(num_bytes, is_pinned=has_copies))
        if has_copies:
            self._stream = torch.cuda.Stream(self._device)

    def begin(self, order: Sequence[int], names: Collection[str]) -> None:
        """Wait for all gradients, and start to read the first buckets."""
        super().begin(order, names)
        self._ranges = {index: self._list_ranges(pieces) for index, pieces in self._pieces.items()}
        self._arriving = {
            index: self._request(ranges) for index, ranges in self._ranges.items() if ranges
        }
        if self.working_weights is not None:
            self._allocate_next()

    def view(self, piece: BucketPiece) -> tuple[Tensor, Tensor]:
        """Return a piece of a weight, and of its gradient, of the open bucket."""
        return self._views[piece.name, piece.first_row]

    def close(self) -> None:
        """Begin no read any more."""
        if self._ring is not None:
            self._ring.close()

    def _list_ranges(self, pieces: Sequence[BucketPiece]) -> list[_StagedRange]:
        ranges = []
        offset = 0
        for piece in pieces:
            _, block, member = self._places[piece.name]
            size = self._count_bytes(piece)
            first = (piece.first_element or 0) * member.parameter.dtype.itemsize
            assert first == round_to_pages(first), "a piece begins on a page"
            weights = block.weight_place + member.offset + first
            gradient = block.gradient_place + member.gradient_offset + first
            ranges.append(_StagedRange(piece, (weights, gradient), (offset, offset + size), size))
            offset += 2 * size
        return ranges

    def _request(self, ranges: Sequence[_StagedRange]) -> Future[StagedBucket]:
        """Start to read a bucket's weights and gradients as soon as there is staging memory."""
        arriving: Future[StagedBucket] = Future()

        def start(memory: Future[StagedBucket]) -> None:
            if memory.cancelled():
                arriving.cancel()
                return
            staged = memory.result()
            pages = [
                (position, staged.memory[offset : offset + part.num_bytes])
                for part in ranges
                for position, offset in zip(part.positions, part.offsets, strict=True)
            ]
            with suppress(RuntimeError):  # the run has failed, and nobody waits for the bucket
                read = self._disk_store.read_staged(staged, pages)
                read.add_done_callback(partial(pass_result, arriving))

        assert self._ring is not None
        self._ring.take(sum(2 * part.num_bytes for part in ranges)).add_done_callback(start)
        return arriving

    def _open(self, index: int) -> None:
        """Wait for weights and gradients of a bucket."""
        self._views = {}
        if index not in self._arriving:
            return
        start_seconds = time.perf_counter()
        self._opened = staged = self._arriving.pop(index).result()
        self._store.counts.waiting_seconds += time.perf_counter() - start_seconds
        for part in self._ranges[index]:
            member = self._places[part.piece.name].member
            shape = part.piece.get_shape(member.shape)
            weights, gradient = (
                staged.memory[offset : offset + part.num_bytes]
                .view(member.parameter.dtype)[: shape.numel()]
                .view(shape)
                for offset in part.offsets
            )
            self._views[part.piece.name, part.piece.first_row] = weights, gradient

    def _close(self, index: int) -> None:
        """Start to write the updated weights, and to copy them to the device for working weights;
        their memory is free afterwards."""
        staged = self._opened
        self._opened = None
        if staged is None:
            return
        for part in self._ranges[index]:
            offset, _ = part.offsets
            self._store.write(part.positions[0], staged.memory[offset : offset + part.num_bytes])
        copied_event = None
        if self.working_weights is not None:
            copied_event = self._launch_copies(self._pieces[index], self.working_weights)
        self._disk_store.run_after_writes(partial(self._give_back, staged, copied_event))

    def _launch_copies(
        self, pieces: Sequence[BucketPiece], working_weights: WorkingWeights
    ) -> torch.cuda.Event:
        """Launch the copies of updated weights to their places on the device."""
        assert self._stream is not None
        assert self._allocated_event is not None
        _, block, _ = self._places[pieces[0].name]
        members = [self._places[piece.name].member for piece in pieces]
        self._stream.wait_event(self._allocated_event)
        with torch.cuda.stream(self._stream):
            for piece, member in zip(pieces, members, strict=True):
                target = piece.select(get_local_tensor(member.parameter.detach()).data)
                target.copy_(self.view(piece)[0], non_blocking=True)
            copied_event = self._stream.record_event()
        working_weights.mark_changed(member.parameter for member in members)
        block.allocate().append(partial(self._wait_for_copies, copied_event))
        return copied_event

    def _allocate_next(self) -> None:
        """Allocate the device memory of the next unit.

        Until now it may be in use by what training has launched. This is before training launches
        the pass of the unit that was updated last, so the next unit's copies do not wait for that
        pass, and its staging memory is free again during it.
        """
        pending = (unit for unit in self._ended_units.values() if unit in self.pending_units)
        following = next(pending, None)
        if following is not None:
            self._blocks[following].allocate()
            self._allocated_event = torch.cuda.current_stream(self._device).record_event()

    def _wait_for_copies(self, copied_event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(copied_event)

    def _give_back(self, staged: StagedBucket, copied_event: torch.cuda.Event | None) -> None:
        """Free staging memory, on the writer thread."""
        if copied_event is not None:
            copied_event.synchronize()
        assert self._ring is not None
        self._ring.give_back(staged)

    def _bring(self, unit: int) -> None:
        """Do nothing: updated weights have been copied bucket by bucket; others are current."""
