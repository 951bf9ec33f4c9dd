"""Stores of frozen weights, which are written once and then only read."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.checkpoint.disk import LOCAL_DISK, Disk
from shardwright.errors import OffloadFailed
from shardwright.offload.activation_store import Wait
from shardwright.offload.disk_store import advise_large_pages
from shardwright.offload.staging_buffer import StagingBuffer
from shardwright.offload.state_buckets import PAGE_BYTES
from shardwright.offload.store import CopyClock, TransferCounts, TransferThreads

logger = logging.getLogger("shardwright")

_MAX_GAP_BYTES = 1 << 16
"""Bytes between two ranges of a file that are read with them, in place of a second read."""


@dataclass(frozen=True)
class StoredRange:
    """Bytes of a model's file, and their place in a block's memory."""

    path: Path
    position: int
    num_bytes: int
    target: int


@dataclass(frozen=True)
class WrittenRange:
    """Bytes that no file has, and their place in a block's memory."""

    num_bytes: int
    target: int
    pieces: Callable[[], Iterable[Tensor]]
    """Returns the bytes in consecutive pieces of any length, each `[N]` in host memory."""


WeightRange = StoredRange | WrittenRange


class WeightStore(Protocol):
    """Bytes of blocks. One thread calls all methods."""

    @property
    def counts(self) -> TransferCounts:
        """Bytes and times of all transfers so far."""
        ...

    def add(self, num_bytes: int, ranges: Sequence[WeightRange]) -> Any:
        """Store a block's `num_bytes`, of which `ranges` have values; return its place."""
        ...

    def read(self, place: Any, target: Tensor) -> Wait:
        """Start to copy a place to the device, `[N]`; valid after the wait."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


class PinnedWeightStore:
    """Pinned host memory, and a copy stream of a CUDA device. The host waits for no copy."""

    def __init__(self, device: torch.device) -> None:
        self._counts = TransferCounts()
        self._clock = CopyClock(self._counts, device)
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @property
    def counts(self) -> TransferCounts:
        """Bytes and times of all transfers that have ended."""
        return self._clock.collect()

    def add(self, num_bytes: int, ranges: Sequence[WeightRange]) -> Tensor:
        """Copy the values to new memory. PyTorch rounds its size up to a power of two."""
        place = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        for part in ranges:
            assert isinstance(part, WrittenRange)
            offset = part.target
            for piece in part.pieces():
                place[offset : offset + piece.numel()].copy_(piece)
                offset += piece.numel()
        return place

    def read(self, place: Tensor, target: Tensor) -> Wait:
        """Copy once the kernels that used the memory before have ended."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            begin = self._clock.begin()
            target.copy_(place, non_blocking=True)
            copied = self._clock.end("reading_seconds", begin)
        self._counts.read_bytes += place.numel()
        return partial(self._clock.wait, copied)

    def close(self) -> None:
        """Leave the memory to the places' owner."""


@dataclass(frozen=True)
class _Copy:
    """Bytes of a window and their place in a block's memory."""

    offset: int
    num_bytes: int
    target: int


@dataclass
class _Window:
    """Pages of a file that are read at once, and the copies from them."""

    descriptor: int
    position: int
    num_bytes: int
    copies: list[_Copy] = field(default_factory=list)


@dataclass(frozen=True)
class _FileRange:
    descriptor: int
    position: int
    num_bytes: int
    target: int


class DiskWeightStore:
    """The model's own files, and a scratch file for what they do not have; only read later.

    A staging buffer's threads read whole pages with direct I/O and copy from them.
    """

    def __init__(
        self, folder: Path, buffer_bytes: int, device: torch.device, *, disk: Disk = LOCAL_DISK
    ) -> None:
        self.counts = TransferCounts()
        self.scratch_bytes = 0
        self._folder = folder
        self._disk = disk
        self._device = device
        self._paths: dict[int, Path] = {}
        """Files by descriptor."""
        self._versions: dict[int, tuple[int, int]] = {}
        """Size and time of change of the model's files, by descriptor."""
        self._scratch: int | None = None
        self._buffer = StagingBuffer(buffer_bytes, device, "weight")
        self._reader = TransferThreads(1, thread_name_prefix="weight-read")

    def add(self, num_bytes: int, ranges: Sequence[WeightRange]) -> list[_Window]:
        """Write the ranges that have no file to the scratch file; open the files of the others.

        Raises:
            OffloadFailed: a file cannot be opened or written.
        """
        found = [
            self._write(part)
            if isinstance(part, WrittenRange)
            else _FileRange(self._open(part.path), part.position, part.num_bytes, part.target)
            for part in ranges
        ]
        return _plan_windows(found, self._buffer.part_bytes)

    def _open(self, path: Path) -> int:
        for descriptor, opened in self._paths.items():
            if opened == path:
                return descriptor
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._describe(error, path, "opened") from error
        self._paths[descriptor] = path
        self._versions[descriptor] = _read_version(descriptor)
        self._bypass_cache(descriptor, path)
        return descriptor

    def _bypass_cache(self, descriptor: int, path: Path) -> None:
        if not self._disk.bypass_cache(descriptor, True):
            logger.warning(
                "offload.parameters: the file system of %s has no direct I/O: reads go through "
                "the page cache, which takes host memory and time",
                path,
            )

    def _write(self, part: WrittenRange) -> _FileRange:
        """Append a range to the scratch file, from the beginning of a page."""
        try:
            if self._scratch is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._scratch = self._disk.create_scratch(self._folder)
                self._paths[self._scratch] = self._folder
                self._bypass_cache(self._scratch, self._folder)
            first = self.scratch_bytes
            self.scratch_bytes += -(-part.num_bytes // PAGE_BYTES) * PAGE_BYTES
            self._disk.reserve(self._scratch, self.scratch_bytes)
            write = partial(self._write_pages, self._scratch, first)
            self._buffer.write_pieces(part.pieces(), write)
        except OSError as error:
            raise self._describe(error, self._folder, "written") from error
        return _FileRange(self._scratch, first, part.num_bytes, part.target)

    def _write_pages(self, descriptor: int, first: int, pages: Tensor, start: int) -> None:
        self._disk.write_at(descriptor, pages.numpy().data, first + start)

    def read(self, place: list[_Window], target: Tensor) -> Wait:
        """Read on the store's thread, once the kernels that used the memory have ended."""
        ready = None
        if self._device.type == "cuda":
            ready = torch.cuda.current_stream(self._device).record_event()
        job = self._reader.submit(self._read, place, target, ready)
        return lambda: self._wait(job)

    def _wait(self, job: Future[None]) -> None:
        start_seconds = time.perf_counter()
        job.result()
        self.counts.waiting_seconds += time.perf_counter() - start_seconds

    def _read(
        self, windows: Sequence[_Window], target: Tensor, ready: torch.cuda.Event | None
    ) -> None:
        start_seconds = time.perf_counter()
        if self._device.type == "cpu":
            advise_large_pages(target)  # here, because its memory is new for each transfer
        self._buffer.read(
            (
                (
                    partial(self._fill, window),
                    [
                        (item.offset, target[item.target :][: item.num_bytes])
                        for item in window.copies
                    ],
                )
                for window in windows
            ),
            ready,
        )
        self.counts.read_bytes += sum(
            item.num_bytes for window in windows for item in window.copies
        )
        self.counts.reading_seconds += time.perf_counter() - start_seconds

    def _fill(self, window: _Window, part: Tensor) -> None:
        """Read a window into a part of the staging buffer."""
        path = self._paths[window.descriptor]
        data = part[: window.num_bytes].numpy().data
        try:
            self._disk.read_until_end(window.descriptor, data, window.position)
        except OSError as error:
            raise self._describe(error, path, "read") from error
        version = self._versions.get(window.descriptor)
        if version is not None and version != _read_version(window.descriptor):
            raise OffloadFailed(
                f"offload.parameters: {path} has changed since the run began. Saved "
                "checkpoints are intact: restore the file and resume from the last one"
            )

    def close(self) -> None:
        """Stop the threads and close all files; the scratch file then ceases to exist."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._buffer.close()
        for descriptor in self._paths:
            self._disk.close(descriptor)
        self._paths.clear()

    @staticmethod
    def _describe(error: OSError, path: Path, verb: str) -> OffloadFailed:
        return OffloadFailed(
            f"offload.parameters: frozen weights in {path} could not be {verb}: "
            f"{error.strerror or error}. Saved checkpoints are intact: resume from the last one"
        )


def _read_version(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _plan_windows(ranges: Sequence[_FileRange], buffer_bytes: int) -> list[_Window]:
    """Divide ranges into windows of whole pages that fit the buffer, near ranges together."""
    windows: list[_Window] = []
    for part in sorted(ranges, key=lambda item: (item.descriptor, item.position)):
        done = 0
        while done < part.num_bytes:
            position = part.position + done
            window = windows[-1] if windows else None
            if (
                window is None
                or window.descriptor != part.descriptor
                or position > window.position + window.num_bytes + _MAX_GAP_BYTES
                or not window.position <= position < window.position + buffer_bytes
            ):
                window = _Window(part.descriptor, position // PAGE_BYTES * PAGE_BYTES, 0)
                windows.append(window)
            offset = position - window.position
            count = min(part.num_bytes - done, buffer_bytes - offset)
            window.copies.append(_Copy(offset, count, part.target + done))
            window.num_bytes = max(
                window.num_bytes, -(-(offset + count) // PAGE_BYTES) * PAGE_BYTES
            )
            done += count
    return windows
