"""Host memory that bytes pass through between a disk and memory that direct I/O cannot reach.

The buffer has parts. While the caller's thread reads or writes one, a second thread copies others,
with CUDA on a stream of its own. So a transfer takes about the longer of both times, not the sum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from shardwright.offload.disk_store import allocate_buffer
from shardwright.offload.state_buckets import PAGE_BYTES, round_to_pages

_NUM_PARTS = 8
"""Parts of a buffer that is large enough. Small parts stay in the processor's cache."""

FillPart = Callable[[Tensor], object]
"""Reads bytes from the disk into a part."""
PartCopy = tuple[int, Tensor]
"""First byte in a part, and the memory to copy to, `[N]` bytes."""


class StagingBuffer:
    """Buffer of one direction. One thread at a time calls its methods."""

    def __init__(self, num_bytes: int, device: torch.device, thread_name: str) -> None:
        """
        Args:
            num_bytes: a multiple of the page size.
        """
        is_pinned = device.type == "cuda"
        self.part_bytes = max(1, num_bytes // _NUM_PARTS // PAGE_BYTES) * PAGE_BYTES
        self._memory = allocate_buffer(num_bytes, is_pinned=is_pinned)
        self._parts = [
            self._memory[start : start + self.part_bytes]
            for start in range(0, num_bytes - self.part_bytes + 1, self.part_bytes)
        ]
        self._stream = torch.cuda.Stream(device) if is_pinned else None
        self._copier = ThreadPoolExecutor(1, thread_name_prefix=f"{thread_name}-copy")

    def read(
        self,
        steps: Iterable[tuple[FillPart, Sequence[PartCopy]]],
        ready: torch.cuda.Event | None,
    ) -> None:
        """Fill one part after another on this thread, and copy from them on the second one.

        Args:
            ready: event after which the copies' memory may be written; None without CUDA.
        """
        copies: deque[Future[None]] = deque()
        try:
            for number, (fill, targets) in enumerate(steps):
                if len(copies) == len(self._parts):
                    copies.popleft().result()
                part = self._parts[number % len(self._parts)]
                fill(part)
                pairs = [
                    (target, part[first : first + target.numel()]) for first, target in targets
                ]
                copies.append(self._copier.submit(self._copy, pairs, ready))
            for copy in copies:
                copy.result()
        finally:
            wait(copies)  # the caller may free the memory

    def write(
        self,
        data: Tensor,
        write: Callable[[Tensor, int], None],
        ready: torch.cuda.Event | None,
    ) -> None:
        """Copy bytes, `[N]`, to one part after another on the second thread; write each on this.

        Args:
            write: receives whole pages and the position of their first byte in `data`.
            ready: event after which `data` may be read; None without CUDA.
        """
        copies: deque[tuple[Tensor, int, Future[None]]] = deque()
        try:
            for start in range(0, data.numel(), self.part_bytes):
                if len(copies) == len(self._parts):
                    _write_first(copies, write)
                piece = data[start : start + self.part_bytes]
                part = self._parts[start // self.part_bytes % len(self._parts)]
                pairs = [(part[: piece.numel()], piece)]
                job = self._copier.submit(self._copy, pairs, ready)
                copies.append((part[: round_to_pages(piece.numel())], start, job))
            while copies:
                _write_first(copies, write)
        finally:
            wait([copy for _, _, copy in copies])

    def write_pieces(self, pieces: Iterable[Tensor], write: Callable[[Tensor, int], None]) -> None:
        """Write consecutive pieces of bytes, each `[N]` in host memory, whole pages at a time.

        Args:
            write: receives pages and the position of their first byte in the sequence.
        """
        memory = self._memory
        position = filled = 0
        for piece in pieces:
            start = 0
            while start < piece.numel():
                count = min(memory.numel() - filled, piece.numel() - start)
                memory[filled : filled + count].copy_(piece[start : start + count])
                start += count
                filled += count
                if filled == memory.numel():
                    write(memory, position)
                    position += filled
                    filled = 0
        if filled:
            write(memory[: round_to_pages(filled)], position)

    def close(self) -> None:
        """Stop the second thread."""
        self._copier.shutdown(wait=True)

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]], ready: torch.cuda.Event | None) -> None:
        """Copy to the first of each pair; wait until the copies have ended."""
        if self._stream is None or ready is None:
            for target, source in pairs:
                target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        self._stream.synchronize()


def _write_first(
    copies: deque[tuple[Tensor, int, Future[None]]], write: Callable[[Tensor, int], None]
) -> None:
    part, start, copy = copies.popleft()
    copy.result()
    write(part, start)
