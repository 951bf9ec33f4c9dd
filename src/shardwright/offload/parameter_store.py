"""Scratch file of trained weights and their gradients: read and written in whole places.

One thread reads and one writes with direct I/O. A place begins on a page. As the file of moments,
it has no name and its blocks are reserved before training.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shardwright.checkpoint.disk import LOCAL_DISK, Disk
from shardwright.offload.activation_store import Wait
from shardwright.offload.scratch_transfers import ScratchTransfers
from shardwright.offload.staging_ring import StagedBucket
from shardwright.offload.state_buckets import round_to_pages
from shardwright.offload.store import TransferCounts
from shardwright.units import format_bytes

logger = logging.getLogger("shardwright")


class ParameterStore(Protocol):
    """Bytes of weights and gradients in places. One thread calls all methods."""

    num_bytes: int
    """Bytes of all places."""

    @property
    def counts(self) -> TransferCounts:
        """Bytes and times of all transfers so far."""
        ...

    def add(self, num_bytes: int) -> int:
        """Reserve a place; return its first byte."""
        ...

    def fill(self, position: int, pieces: Iterable[Tensor]) -> None:
        """Write consecutive pieces of bytes, each `[N]` in host memory, from a page on."""
        ...

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocate bytes on the device, `[N]`, that transfers reach without a copy."""
        ...

    def read(self, position: int, target: Tensor) -> Wait:
        """Start to read bytes into `target`, `[N]`; valid after the wait."""
        ...

    def write(self, position: int, source: Tensor) -> Wait:
        """Start to write `source`, contiguous; it may change after the wait."""
        ...

    def synchronise(self) -> None:
        """Make the host wait for all transfers."""
        ...

    def view(self, position: int, num_bytes: int) -> Tensor:
        """Return bytes of the store, valid until their next transfer; earlier ones have ended."""
        ...

    def close(self) -> None:
        """Discard the content and free everything."""
        ...


class DiskParameterStore(ScratchTransfers):
    """Bytes of weights and gradients in one scratch file. One thread calls all methods."""

    _FILE = "offload.dir: the scratch file of weights"
    _REMEDY = (
        "Free space or choose another folder; saved checkpoints are intact: resume from the last"
    )

    def __init__(
        self, folder: Path, buffer_bytes: int, device: torch.device, *, disk: Disk = LOCAL_DISK
    ) -> None:
        """
        Raises:
            OffloadFailed: the folder cannot be written.
        """
        super().__init__(folder, buffer_bytes, device, disk, "parameter")
        self.num_bytes = 0
        """Bytes of all places."""
        self._descriptor = self._attempt("created", self._create_file)
        self._map: mmap.mmap | None = None
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
        self.num_bytes += round_to_pages(num_bytes)
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
        self._write_buffer.write_pieces(
            pieces, lambda pages, start: self._write_pages(pages, position + start)
        )

    def read(self, position: int, target: Tensor) -> Wait:
        """Start to read bytes from a page on into `target`, `[N]`; valid after the wait.

        Bytes whose write has not ended are read after it.
        """
        self._unmap()
        pending = self._find_writes(position, position + target.numel())
        job = self._start_read(position, target, pending)
        return lambda: self._wait(job)

    def write(self, position: int, source: Tensor) -> Wait:
        """Start to write `source`, contiguous, from a page on; it may change after the wait."""
        self._unmap()
        data = source.detach().view(-1).view(torch.uint8)
        job = self._start_write(position, data)
        self._writes.append((position, position + data.numel(), job))
        return lambda: self._wait(job)

    def read_staged(
        self, staged: StagedBucket, pages: Sequence[tuple[int, Tensor]]
    ) -> Future[StagedBucket]:
        """Start to read pages from positions into their places in staging memory.

        No write of these bytes is on its way. Any thread may call it.
        """
        return self._reader.submit(self._read_staged, staged, pages)

    def _read_staged(
        self, staged: StagedBucket, pages: Sequence[tuple[int, Tensor]]
    ) -> StagedBucket:
        for position, memory in pages:
            self._read(position, memory, (), None)
        return staged

    def run_after_writes(self, function: Callable[[], None]) -> None:
        """Run a function on the writer thread, after the writes that have been started."""
        self._writer.submit(function)

    def synchronise(self) -> None:
        """Wait for all writes; a read has a wait of its own."""
        for _, _, job in self._writes:
            job.result()
        self._writes.clear()

    def view(self, position: int, num_bytes: int) -> Tensor:
        """Return bytes of a mapping of the file, valid until the next transfer.

        Reading them saves, and writing into them loads, without a copy in memory. Writes must have
        ended (`synchronise`).
        """
        if self._map is None:
            self._map = mmap.mmap(self._descriptor, self.num_bytes)
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=position, count=num_bytes)

    def close(self) -> None:
        """Stop the threads; the file then ceases to exist."""
        self._map = None
        super().close()

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
