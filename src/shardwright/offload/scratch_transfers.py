"""Transfers between a scratch file on a local disk and the device.

One thread reads and one writes with direct I/O. On a CPU whole pages move without a copy, if the
memory begins on a page. All else passes through a staging buffer per direction, with CUDA on a
copy stream of its own.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from shardwright.checkpoint.disk import Disk
from shardwright.errors import OffloadFailed
from shardwright.offload.disk_store import advise_large_pages, allocate_buffer
from shardwright.offload.state_buckets import PAGE_BYTES, round_to_pages
from shardwright.offload.store import TransferCounts

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
        is_pinned = device.type == "cuda"
        self._read_buffer = allocate_buffer(buffer_bytes, is_pinned=is_pinned)
        self._write_buffer = allocate_buffer(buffer_bytes, is_pinned=is_pinned)
        self._stream_in = torch.cuda.Stream(device) if is_pinned else None
        self._stream_out = torch.cuda.Stream(device) if is_pinned else None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix=f"{thread_name}-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=f"{thread_name}-write")

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
        buffer = self._read_buffer
        if self._device.type == "cpu":
            advise_large_pages(target)  # here, because its memory is new for each transfer
        direct = self._select_direct_pages(target)
        self._read_pages(direct, position)
        self.counts.read_bytes += direct.numel()
        for start in range(direct.numel(), target.numel(), buffer.numel()):
            count = min(buffer.numel(), target.numel() - start)
            self._read_pages(buffer[: round_to_pages(count)], position + start)
            _copy(target[start : start + count], buffer[:count], self._stream_in, ready)
            self.counts.read_bytes += count
        self.counts.reading_seconds += time.perf_counter() - start_seconds

    def _write(self, position: int, data: Tensor, ready: torch.cuda.Event | None) -> None:
        """Write on the writer thread."""
        start_seconds = time.perf_counter()
        buffer = self._write_buffer
        direct = self._select_direct_pages(data)
        self._write_pages(direct, position)
        self.counts.written_bytes += direct.numel()
        for start in range(direct.numel(), data.numel(), buffer.numel()):
            count = min(buffer.numel(), data.numel() - start)
            _copy(buffer[:count], data[start : start + count], self._stream_out, ready)
            self._write_pages(buffer[: round_to_pages(count)], position + start)
            self.counts.written_bytes += count
        self.counts.writing_seconds += time.perf_counter() - start_seconds

    def _select_direct_pages(self, memory: Tensor) -> Tensor:
        """Return the first bytes of `memory`, `[N]`, that direct I/O can reach: whole pages."""
        if self._device.type != "cpu" or memory.data_ptr() % PAGE_BYTES:
            return memory[:0]
        return memory[: memory.numel() // PAGE_BYTES * PAGE_BYTES]

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


def _copy(
    target: Tensor,
    source: Tensor,
    stream: torch.cuda.Stream | None,
    ready: torch.cuda.Event | None,
) -> None:
    """Copy on a store's thread, with CUDA on its own stream; wait until it has ended.

    The thread waits, because it uses the staging buffer again; training does not.
    """
    if stream is None or ready is None:
        target.copy_(source)
        return
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        target.copy_(source, non_blocking=True)
    stream.synchronize()
