"""Transfers between a scratch file on a local disk and the device.

One thread reads and one writes with direct I/O. On a CPU whole pages move without a copy, if the
memory begins on a page. All else passes through a staging buffer per direction.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from shardwright.checkpoint.disk import Disk
from shardwright.errors import OffloadFailed
from shardwright.offload.disk_store import advise_large_pages
from shardwright.offload.staging_buffer import StagingBuffer
from shardwright.offload.state_buckets import PAGE_BYTES, round_to_pages
from shardwright.offload.store import TransferCounts, TransferThreads

_Result = TypeVar("_Result")


class ScratchTransfers:
    """Base of stores in a scratch file, which a subclass creates as `_descriptor`."""

    _FILE: ClassVar[str]
    """Field of the recipe and name of the file, for errors."""
    _REMEDY: ClassVar[str]
    """Last sentence of errors."""

    def __init__(
        self, folder: Path, buffer_bytes: int, device: torch.device, disk: Disk, thread_name: str
    ) -> None:
        self.counts = TransferCounts()
        self._folder = folder
        self._disk = disk
        self._device = device
        self._descriptor = -1
        self._read_buffer = StagingBuffer(buffer_bytes, device, f"{thread_name}-read")
        self._write_buffer = StagingBuffer(buffer_bytes, device, f"{thread_name}-write")
        self._reader = TransferThreads(1, thread_name_prefix=f"{thread_name}-read")
        self._writer = TransferThreads(1, thread_name_prefix=f"{thread_name}-write")

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocate bytes on the device, `[N]`; on a CPU they begin on a page."""
        if self._device.type != "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        memory = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8)
        start = -memory.data_ptr() % PAGE_BYTES
        return memory[start : start + num_bytes]

    def close(self) -> None:
        """Stop the threads; the file then ceases to exist."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._writer.shutdown(wait=True, cancel_futures=True)
        self._read_buffer.close()
        self._write_buffer.close()
        if self._descriptor >= 0:
            self._disk.close(self._descriptor)
            self._descriptor = -1

    def _start_read(
        self, position: int, target: Tensor, pending: Sequence[Future[None]] = ()
    ) -> Future[None]:
        """Start to read bytes from a page on into `target`, `[N]`, after the writes `pending`."""
        return self._reader.submit(self._read, position, target, pending, self._record_event())

    def _start_write(self, position: int, data: Tensor) -> Future[None]:
        """Start to write bytes, `[N]`, from a page on."""
        return self._writer.submit(self._write, position, data, self._record_event())

    def _record_event(self) -> torch.cuda.Event | None:
        """Record what training has launched so far; None without CUDA."""
        if self._device.type != "cuda":
            return None
        return torch.cuda.current_stream(self._device).record_event()

    def _wait(self, job: Future[None]) -> None:
        start_seconds = time.perf_counter()
        job.result()
        self.counts.waiting_seconds += time.perf_counter() - start_seconds

    def _read(
        self,
        position: int,
        target: Tensor,
        pending: Sequence[Future[None]],
        ready: torch.cuda.Event | None,
    ) -> None:
        """Read on the reader thread, once the writes of the same bytes have ended."""
        for job in pending:
            job.result()
        start_seconds = time.perf_counter()
        if self._device.type == "cpu":
            advise_large_pages(target)  # here, because its memory is new for each transfer
        direct = self._select_direct_pages(target)
        self._read_pages(direct, position)
        size = self._read_buffer.part_bytes
        pieces = (
            (position + start, target[start : start + size])
            for start in range(direct.numel(), target.numel(), size)
        )
        steps = ((partial(self._fill, first, piece), [(0, piece)]) for first, piece in pieces)
        self._read_buffer.read(steps, ready)
        self.counts.read_bytes += target.numel()
        self.counts.reading_seconds += time.perf_counter() - start_seconds

    def _write(self, position: int, data: Tensor, ready: torch.cuda.Event | None) -> None:
        """Write on the writer thread."""
        start_seconds = time.perf_counter()
        direct = self._select_direct_pages(data)
        self._write_pages(direct, position)
        first = position + direct.numel()
        self._write_buffer.write(
            data[direct.numel() :],
            lambda part, start: self._write_pages(part, first + start),
            ready,
        )
        self.counts.written_bytes += data.numel()
        self.counts.writing_seconds += time.perf_counter() - start_seconds

    def _select_direct_pages(self, memory: Tensor) -> Tensor:
        """Return the first bytes of `memory`, `[N]`, that direct I/O can reach: whole pages."""
        if memory.device.type != "cpu" or memory.data_ptr() % PAGE_BYTES:
            return memory[:0]
        return memory[: memory.numel() // PAGE_BYTES * PAGE_BYTES]

    def _fill(self, position: int, piece: Tensor, part: Tensor) -> None:
        """Read the bytes of a piece of memory into a part of the staging buffer."""
        self._read_pages(part[: round_to_pages(piece.numel())], position)

    def _read_pages(self, pages: Tensor, position: int) -> None:
        if pages.numel():
            data = _view_bytes(pages)
            self._attempt("read", partial(self._disk.read_at, self._descriptor, data, position))

    def _write_pages(self, pages: Tensor, position: int) -> None:
        if pages.numel():
            data = _view_bytes(pages)
            self._attempt("written", partial(self._disk.write_at, self._descriptor, data, position))

    def _attempt(self, verb: str, operation: Callable[[], _Result]) -> _Result:
        """Run a file operation; raise one error that names the folder."""
        try:
            return operation()
        except OSError as error:
            raise OffloadFailed(
                f"{self._FILE} in {self._folder} could not be {verb}: {error.strerror or error}. "
                f"{self._REMEDY}"
            ) from error


def _view_bytes(memory: Tensor) -> memoryview:
    """Return a view of memory on a CPU; after `Tensor.numpy` its storage could not be freed."""
    return memoryview((ctypes.c_ubyte * memory.numel()).from_address(memory.data_ptr()))
