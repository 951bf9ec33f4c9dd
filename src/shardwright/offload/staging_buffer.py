"""Host memory that bytes pass through between a disk and memory that direct I/O cannot reach.

The buffer has parts, and a thread for each. A thread reads a part and copies from it, or copies to
it and writes it. So several requests are in flight, and copies run meanwhile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from functools import partial

import torch
from torch import Tensor

from shardwright.offload.disk_store import allocate_buffer
from shardwright.offload.state_buckets import PAGE_BYTES, round_to_pages
from shardwright.offload.store import TransferThreads

_NUM_PARTS = 4
_PARTS_PER_BUFFER = 16
"""Parts that would fill `buffer_bytes`. Small parts stay in the processor's cache."""

FillPart = Callable[[Tensor], object]
"""Reads bytes from the disk into a part."""
PartCopy = tuple[int, Tensor]
"""First byte in a part, and the memory to copy to, `[N]` bytes."""


def compute_staging_buffer_bytes(buffer_bytes: int) -> int:
    """Return the memory of one direction's staging buffer: a quarter of `offload.buffer_bytes`."""
    return _NUM_PARTS * max(1, buffer_bytes // _PARTS_PER_BUFFER // PAGE_BYTES) * PAGE_BYTES


class StagingBuffer:
    """Buffer of one direction. One thread at a time calls its methods."""

    def __init__(self, buffer_bytes: int, device: torch.device, thread_name: str) -> None:
        """
        Args:
            buffer_bytes: of the recipe.
        """
        is_pinned = device.type == "cuda"
        num_bytes = compute_staging_buffer_bytes(buffer_bytes)
        self.part_bytes = num_bytes // _NUM_PARTS
        self._memory = allocate_buffer(num_bytes, is_pinned=is_pinned)
        self._free = list(self._memory.split(self.part_bytes))
        """Parts that no thread uses."""
        self._stream = torch.cuda.Stream(device) if is_pinned else None
        self._threads = TransferThreads(_NUM_PARTS, thread_name_prefix=f"{thread_name}-part")

    def read(
        self,
        steps: Iterable[tuple[FillPart, Sequence[PartCopy]]],
        ready: torch.cuda.Event | None,
    ) -> None:
        """Fill parts and copy from each; steps run in any order.

        Args:
            ready: event after which the copies' memory may be written; None without CUDA.
        """

        def run(fill: FillPart, targets: Sequence[PartCopy], part: Tensor) -> None:
            fill(part)
            pairs = [(target, part[first : first + target.numel()]) for first, target in targets]
            self._copy(pairs, ready)

        self._run(partial(run, fill, targets) for fill, targets in steps)

    def write(
        self,
        data: Tensor,
        write: Callable[[Tensor, int], None],
        ready: torch.cuda.Event | None,
    ) -> None:
        """Copy bytes, `[N]`, to parts and write each, in any order.

        Args:
            write: receives whole pages and the position of their first byte in `data`.
            ready: event after which `data` may be read; None without CUDA.
        """

        def run(start: int, part: Tensor) -> None:
            piece = data[start : start + self.part_bytes]
            self._copy([(part[: piece.numel()], piece)], ready)
            write(part[: round_to_pages(piece.numel())], start)

        self._run(partial(run, start) for start in range(0, data.numel(), self.part_bytes))

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
        """Stop the threads."""
        self._threads.shutdown(wait=True)

    def _run(self, jobs: Iterable[Callable[[Tensor], None]]) -> None:
        """Run jobs, each with a part; if one fails, cancel those that have not begun.

        Waits until all have ended, also if one fails, because the caller may then free the memory.
        """
        futures = [self._threads.submit(self._run_with_part, job) for job in jobs]
        for future in wait(futures, return_when=FIRST_EXCEPTION).not_done:
            future.cancel()
        wait(futures)
        for future in futures:  # a job that was cancelled comes after the one that failed
            future.result()

    def _run_with_part(self, job: Callable[[Tensor], None]) -> None:
        part = self._free.pop()
        try:
            job(part)
        finally:
            self._free.append(part)

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]], ready: torch.cuda.Event | None) -> None:
        """Copy to the first of each pair; wait until the copies have ended."""
        if self._stream is None or ready is None:
            for target, source in pairs:
                # `Tensor.copy_` would start a team of OpenMP threads for each of ours.
                ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        self._stream.synchronize()
