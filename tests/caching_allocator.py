"""Simulation of torch's caching allocator for CUDA, with fixed and with expandable segments.

Sizes and rules are those of torch's documentation of its CUDA allocator and of its source
(c10/cuda/CUDACachingAllocator.cpp): blocks of 512 bytes and more, two pools, the smallest free
block that fits, free neighbours merged. One stream; memory is never returned to the device.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20
LARGE_PAGE_BYTES = 20 * MIB
"""Smallest growth of the pool of large blocks."""
_SMALL_PAGE_BYTES = 2 * MIB
_SMALL_BYTES = MIB
"""Largest block of the small pool."""


@dataclass(eq=False)
class _Block:
    size: int
    is_small: bool
    is_free: bool = False
    before: _Block | None = None
    after: _Block | None = None


class CachingAllocator:
    """Allocator that counts what it has reserved.

    Args:
        is_expandable: one segment per pool that grows, in place of new segments.

    Attributes:
        reserved_bytes: bytes of all segments.
    """

    def __init__(self, *, is_expandable: bool) -> None:
        self.is_expandable = is_expandable
        self.reserved_bytes = 0
        self._free: dict[_Block, None] = {}
        self._last: dict[bool, _Block] = {}

    def allocate(self, size: int) -> _Block:
        """Return a block of at least `size` bytes."""
        size = _round_up(max(size, 1), 512)
        is_small = size <= _SMALL_BYTES
        fitting = [b for b in self._free if b.is_small == is_small and b.size >= size]
        block = min(fitting, key=lambda b: b.size, default=None)
        if block is None:
            block = self._reserve(size, is_small)
        self._free.pop(block, None)
        block.is_free = False
        rest = block.size - size
        if rest > (_SMALL_BYTES if not (is_small or self.is_expandable) else 511):
            tail = _Block(rest, is_small, True, block, block.after)
            if tail.after is not None:
                tail.after.before = tail
            elif self._last.get(is_small) is block:
                self._last[is_small] = tail
            block.size = size
            block.after = tail
            self._free[tail] = None
        return block

    def free(self, block: _Block) -> None:
        """Free a block and merge it with its free neighbours."""
        block.is_free = True
        for first, second in ((block, block.after), (block.before, block)):
            if first is None or second is None or not (first.is_free and second.is_free):
                continue
            self._free.pop(first, None)
            self._free.pop(second, None)
            first.size += second.size
            first.after = second.after
            if first.after is not None:
                first.after.before = first
            elif self._last.get(first.is_small) is second:
                self._last[first.is_small] = first
            block = first
        self._free[block] = None

    def _reserve(self, size: int, is_small: bool) -> _Block:
        """Reserve a segment, or what the expandable one lacks; return its free block."""
        last = self._last.get(is_small) if self.is_expandable else None
        if last is not None and last.is_free:
            grown = _round_up(size - last.size, _SMALL_PAGE_BYTES if is_small else LARGE_PAGE_BYTES)
            last.size += grown
            self.reserved_bytes += grown
            return last
        if self.is_expandable:
            grown = _round_up(size, _SMALL_PAGE_BYTES if is_small else LARGE_PAGE_BYTES)
        elif is_small:
            grown = _SMALL_PAGE_BYTES
        else:
            grown = LARGE_PAGE_BYTES if size < 10 * MIB else _round_up(size, 2 * MIB)
        block = _Block(grown, is_small, True, last)
        if last is not None:
            last.after = block
        if self.is_expandable:
            self._last[is_small] = block
        self.reserved_bytes += grown
        return block


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
