"""Scratch file of trained weights and their gradients: read and written in whole places.

One thread reads and one writes, each through a staging buffer with direct I/O. A place begins on
a page. As the file of moments, it has no name and its blocks are reserved before training.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from shardwright.checkpoint.disk import LOCAL_DISK, Disk
from shardwright.errors import OffloadFailed
from shardwright.offload.activation_store import Wait
from shardwright.offload.disk_store import allocate_buffer
from shardwright.offload.state_buckets import PAGE_BYTES
from shardwright.offload.store import TransferCounts
from shardwright.units import format_bytes

logger = logging.getLogger("shardwright")

_Result = TypeVar("_Result")


class DiskParameterStore:
    """Bytes of weights and gradients in one scratch file. One thread calls all methods."""

    def __init__(
        self, folder: Path, buffer_bytes: int, device: torch.device, *, disk: Disk = LOCAL_DISK
    ) -> None:
        """
        Raises:
            OffloadFailed: the folder cannot be written.
        """
        self.counts = TransferCounts()
        self.num_bytes = 0
        """Bytes of all places."""
        self._folder = folder
        self._disk = disk
        self._descriptor = self._attempt("created", self._create_file)
        self._map: mmap.mmap | None = None
        is_pinned = device.type == "cuda"
        self._device = device
        self._read_buffer = allocate_buffer(buffer_bytes, is_pinned=is_pinned)
        self._write_buffer = allocate_buffer(buffer_bytes, is_pinned=is_pinned)
        self._stream_in = torch.cuda.Stream(device) if is_pinned else None
        self._stream_out = torch.cuda.Stream(device) if is_pinned else None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="parameter-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="parameter-write")
        self._writes: list[tuple[int, int, Future[None]]] = []
        """First byte, end and result of the writes that may not have ended."""

    def _create_file(self) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = self._disk.create_scratch(self._folder)
        if not self._disk.bypass_cache(descriptor, True):
            logger.warning(
                "offload.dir: the file system of %s has no direct I/O: transfers go through the "
                "page cache, which takes host memory and time",
                self._folder,
            )
        return descriptor

    def add(self, num_bytes: int) -> int:
        """Reserve a place, which reads as zeros; return its first byte in the file.

        Raises:
            OffloadFailed: the disk has not enough free space.
        """
        first = self.num_bytes
        self.num_bytes += -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        if num_bytes:
            self._attempt(
                f"extended to {format_bytes(self.num_bytes)}",
                partial(self._disk.reserve, self._descriptor, self.num_bytes),
            )
        return first

    def fill(self, position: int, pieces: Iterable[Tensor]) -> None:
        """Write consecutive pieces of bytes, each `[N]` in host memory, from a page on.

        Raises:
            OffloadFailed: the disk fails.
        """
        buffer = self._write_buffer
        filled = 0
        for piece in pieces:
            start = 0
            while start < piece.numel():
                count = min(buffer.numel() - filled, piece.numel() - start)
                buffer[filled : filled + count].copy_(piece[start : start + count])
                start += count
                filled += count
                if filled == buffer.numel():
                    self._write_pages(position, filled)
                    position += filled
                    filled = 0
        self._write_pages(position, filled)

    def read(self, position: int, target: Tensor) -> Wait:
        """Start to read bytes from a page on into `target`, `[N]`; valid after the wait.

        Bytes whose write has not ended are read after it.
        """
        self._unmap()
        pending = self._find_writes(position, position + target.numel())
        job = self._reader.submit(self._read, position, target, pending, self._record_event())
        return lambda: self._wait(job)

    def write(self, position: int, source: Tensor) -> Wait:
        """Start to write `source`, contiguous, from a page on; it may change after the wait."""
        self._unmap()
        data = source.detach().view(-1).view(torch.uint8)
        job = self._writer.submit(self._write, position, data, self._record_event())
        self._writes.append((position, position + data.numel(), job))
        return lambda: self._wait(job)

    def view(self, position: int, num_bytes: int) -> Tensor:
        """Return bytes of a mapping of the file, valid until the next transfer.

        Reading them saves, and writing into them loads, without a copy in memory.
        """
        for _, _, job in self._writes:
            job.result()
        self._writes.clear()
        if self._map is None:
            self._map = mmap.mmap(self._descriptor, self.num_bytes)
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=position, count=num_bytes)

    def close(self) -> None:
        """Stop the threads; the file then ceases to exist."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._writer.shutdown(wait=True, cancel_futures=True)
        self._map = None
        if self._descriptor >= 0:
            self._disk.close(self._descriptor)
            self._descriptor = -1

    def _find_writes(self, first: int, end: int) -> list[Future[None]]:
        """Return the writes of these bytes that have not ended."""
        self._writes = [
            item for item in self._writes if not item[2].done() or item[2].exception() is not None
        ]
        return [job for low, high, job in self._writes if low < end and high > first]

    def _unmap(self) -> None:
        """Write the mapping's changes and drop its pages from memory."""
        if self._map is not None:
            self._attempt("written", self._map.flush)
            self._map = None
            with suppress(OSError):
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

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
        pending: list[Future[None]],
        ready: torch.cuda.Event | None,
    ) -> None:
        """Read on the reader thread, once the writes of the same bytes have ended."""
        for job in pending:
            job.result()
        start_seconds = time.perf_counter()
        buffer = self._read_buffer
        for start in range(0, target.numel(), buffer.numel()):
            count = min(buffer.numel(), target.numel() - start)
            pages = buffer[: -(-count // PAGE_BYTES) * PAGE_BYTES]
            self._attempt(
                "read",
                partial(self._disk.read_at, self._descriptor, pages.numpy().data, position + start),
            )
            _copy(target[start : start + count], buffer[:count], self._stream_in, ready)
            self.counts.read_bytes += count
        self.counts.reading_seconds += time.perf_counter() - start_seconds

    def _write(self, position: int, data: Tensor, ready: torch.cuda.Event | None) -> None:
        """Write on the writer thread."""
        start_seconds = time.perf_counter()
        buffer = self._write_buffer
        for start in range(0, data.numel(), buffer.numel()):
            count = min(buffer.numel(), data.numel() - start)
            _copy(buffer[:count], data[start : start + count], self._stream_out, ready)
            self._write_pages(position + start, count)
            self.counts.written_bytes += count
        self.counts.writing_seconds += time.perf_counter() - start_seconds

    def _write_pages(self, position: int, num_bytes: int) -> None:
        """Write the first bytes of the staging buffer, filled up to whole pages."""
        if num_bytes:
            pages = self._write_buffer[: -(-num_bytes // PAGE_BYTES) * PAGE_BYTES]
            self._attempt(
                "written",
                partial(self._disk.write_at, self._descriptor, pages.numpy().data, position),
            )

    def _attempt(self, verb: str, operation: Callable[[], _Result]) -> _Result:
        """Run a file operation; raise one error that names the folder."""
        try:
            return operation()
        except OSError as error:
            raise OffloadFailed(
                f"offload.dir: the scratch file of weights in {self._folder} could not be {verb}: "
                f"{error.strerror or error}. Free space or choose another folder; the last "
                "checkpoint is intact: resume from it"
            ) from error


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
