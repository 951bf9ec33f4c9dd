"""PyTorch's caching allocator of device memory: the pool of large blocks, without addresses.

Sizes and rules are those of c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.1), default settings.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from itertools import count
from math import ceil, inf

from shardwright.units import MIB_BYTES

_ROUNDING_BYTES = 512
_SMALL_BYTES = MIB_BYTES
"""Smaller tensors have a pool of their own. A rest of a block that is not larger is not split."""
_SMALL_SEGMENT_BYTES = 20 * MIB_BYTES
_MIN_OWN_SEGMENT_BYTES = 10 * MIB_BYTES
"""A request of this size or more has a segment of its own, others share one."""
_SEGMENT_ROUNDING_BYTES = 2 * MIB_BYTES


class MemoryBlock:
    """Part of a segment. `previous` and `next` are its neighbours in the segment."""

    __slots__ = ("is_free", "next", "num_bytes", "previous", "serial")

    def __init__(
        self, num_bytes: int, serial: int, previous: MemoryBlock | None, next_: MemoryBlock | None
    ):
        self.num_bytes = num_bytes
        self.serial = serial
        self.is_free = False
        self.previous = previous
        self.next = next_


class CachingAllocator:
    """Blocks of one stream. `reserved_bytes` are those of all segments.

    A block that another stream uses is reusable when the device has finished the launches up to
    the one after which it was freed. The host runs at most `queue_length` launches ahead of the
    device. A full device (`capacity_bytes`) waits for all launches and releases free segments.
    """

    def __init__(self, capacity_bytes: float = inf, queue_length: int = 0) -> None:
        self.capacity_bytes = capacity_bytes
        self.queue_length = queue_length
        self.reserved_bytes = 0
        self._free: list[tuple[int, int, MemoryBlock]] = []  # by size, then age
        self._pending: deque[tuple[int, MemoryBlock]] = deque()
        self._serials = count()
        self._num_launched = 0
        self._num_finished = 0

    def launch(self, num_launches: int) -> None:
        """Count launches of the host. The device finishes those beyond the queue."""
        self._num_launched += num_launches
        self._num_finished = max(self._num_finished, self._num_launched - self.queue_length)

    def synchronise(self) -> None:
        """Let the device finish all launches."""
        self._num_finished = self._num_launched
        self._release_finished()

    def allocate(self, num_bytes: float) -> MemoryBlock | None:
        """Return a block of at least this size: the smallest free one, else a new segment. None
        for a small tensor, which is not counted."""
        size = ceil(num_bytes / _ROUNDING_BYTES) * _ROUNDING_BYTES
        if size <= _SMALL_BYTES:
            return None
        self._release_finished()
        block = self._take(size) or self._reserve(size)
        rest_bytes = block.num_bytes - size
        if rest_bytes > _SMALL_BYTES:
            rest = MemoryBlock(rest_bytes, next(self._serials), block, block.next)
            if block.next is not None:
                block.next.previous = rest
            block.next = rest
            block.num_bytes = size
            self._insert(rest)
        return block

    def free(self, block: MemoryBlock | None, *, is_shared: bool = False) -> None:
        """Free a block. `is_shared`: another stream uses it."""
        if block is None:
            return
        if is_shared:
            self._pending.append((self._num_launched, block))
        else:
            self._release(block)

    def _take(self, size: int) -> MemoryBlock | None:
        index = bisect_left(self._free, (size, -1))
        if index == len(self._free):
            return None
        block = self._free.pop(index)[2]
        block.is_free = False
        return block

    def _reserve(self, size: int) -> MemoryBlock:
        segment_bytes = _SMALL_SEGMENT_BYTES
        if size >= _MIN_OWN_SEGMENT_BYTES:
            segment_bytes = ceil(size / _SEGMENT_ROUNDING_BYTES) * _SEGMENT_ROUNDING_BYTES
        if self.reserved_bytes + segment_bytes > self.capacity_bytes:
            self.synchronise()
            self._release_segments()
        self.reserved_bytes += segment_bytes
        return MemoryBlock(segment_bytes, next(self._serials), None, None)

    def _release_segments(self) -> None:
        for _, _, block in list(self._free):
            if block.previous is None and block.next is None:
                self._remove(block)
                self.reserved_bytes -= block.num_bytes

    def _release_finished(self) -> None:
        while self._pending and self._pending[0][0] <= self._num_finished:
            self._release(self._pending.popleft()[1])

    def _release(self, block: MemoryBlock) -> None:
        """Make a block reusable, merged with free neighbours."""
        after = block.next
        if after is not None and after.is_free:
            self._remove(after)
            block.num_bytes += after.num_bytes
            block.next = after.next
            if after.next is not None:
                after.next.previous = block
        before = block.previous
        if before is not None and before.is_free:
            self._remove(before)
            before.num_bytes += block.num_bytes
            before.next = block.next
            if block.next is not None:
                block.next.previous = before
            block = before
        self._insert(block)

    def _insert(self, block: MemoryBlock) -> None:
        block.is_free = True
        insort(self._free, (block.num_bytes, block.serial, block))

    def _remove(self, block: MemoryBlock) -> None:
        self._free.pop(bisect_left(self._free, (block.num_bytes, block.serial, block)))
        block.is_free = False
