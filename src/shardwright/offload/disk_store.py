"""Store in a scratch file: direct I/O with a reader thread, a writer thread and staging memory.

The file has no name: the operating system removes it when the process ends, however it ends, so
it is never taken for state. Its blocks are reserved before training starts. Reads and writes
bypass the page cache, which would take the memory that offloading is to save and copy every
byte once more. Checkpoints read and write it through a mapping, without a second copy in memory.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from shardwright.checkpoint.disk import LOCAL_DISK, Disk
from shardwright.errors import OffloadFailed
from shardwright.offload.staging_ring import StagedBucket, StagingRing
from shardwright.offload.state_buckets import PAGE_BYTES, StateBucket
from shardwright.offload.store import Swap, TransferCounts
from shardwright.units import format_bytes

logger = logging.getLogger("shardwright")

_Result = TypeVar("_Result")

_MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_LARGE_PAGE_BYTES = 2 * 2**20
"""Of x86; memory that is smaller has no large page."""


class DiskStore:
    """Segments in one scratch file of a local disk."""

    tier: Literal["host", "disk"] = "disk"

    def __init__(
        self,
        folder: Path,
        segment_bytes: Sequence[int],
        capacity_bytes: int,
        *,
        resident_bytes: Mapping[int, int] | None = None,
        is_pinned: bool = False,
        disk: Disk = LOCAL_DISK,
    ) -> None:
        """Reserve the file's blocks, which read as zeros.

        Args:
            capacity_bytes: Staging memory of all other buckets; at least the largest of them.
            resident_bytes: Buckets that have staging memory of their own, and its bytes.

        Raises:
            OffloadFailed: the folder cannot be written, or has not enough free space.
        """
        self.counts = TransferCounts()
        self.capacity_bytes = capacity_bytes
        self.resident_buckets: Collection[int] = frozenset(resident_bytes or ())
        self._folder = folder
        self._disk = disk
        self._offsets = [0, *accumulate(segment_bytes)]
        self._descriptor = self._create_file()
        self._map: mmap.mmap | None = None
        self._ring = StagingRing(allocate_buffer(capacity_bytes, is_pinned=is_pinned))
        self._resident = {
            index: StagedBucket(0, allocate_buffer(num_bytes, is_pinned=is_pinned))
            for index, num_bytes in (resident_bytes or {}).items()
        }
        self._staged: dict[int, StagedBucket] = {}
        """Staging memory of open swaps, by bucket."""
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="offload-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="offload-write")
        self._writes: dict[int, Future[None]] = {}
        """Last write of each bucket, until it is known to have ended."""
        self._failed_write: OffloadFailed | None = None

    def _create_file(self) -> int:
        num_bytes = self._offsets[-1]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = self._disk.create_scratch(self._folder)
            if num_bytes:
                self._disk.reserve(descriptor, num_bytes)
        except OSError as error:
            free = ""
            if self._folder.is_dir():
                status = os.statvfs(self._folder)
                free = f"; {format_bytes(status.f_bavail * status.f_frsize)} are free"
            raise OffloadFailed(
                f"offload.dir: {format_bytes(num_bytes)} of scratch space cannot be reserved in "
                f"{self._folder}: {error.strerror or error}{free}. Free space, or choose another "
                "folder"
            ) from error
        if not self._disk.bypass_cache(descriptor, True):
            logger.warning(
                "offload.dir: the file system of %s has no direct I/O: transfers go through the "
                "page cache, which takes host memory and time",
                self._folder,
            )
        return descriptor

    def swap_in(self, index: int, bucket: StateBucket) -> Swap:
        """Start to read a bucket into staging memory, as soon as there is enough."""
        self._unmap()
        pending_write = self._writes.pop(index, None)
        parts: Future[list[Tensor]] = Future()

        def start(memory: Future[StagedBucket]) -> None:
            if memory.cancelled():
                parts.cancel()
                return
            staged = self._staged[index] = memory.result()
            with suppress(RuntimeError):  # the interpreter exits, and nobody waits for the parts
                read = self._reader.submit(self._read, staged, bucket, pending_write)
                read.add_done_callback(partial(pass_result, parts))

        self._take(index, bucket.num_bytes).add_done_callback(start)
        return Swap(index, bucket, parts)

    def swap_out(self, swap: Swap, ready_event: torch.cuda.Event | None = None) -> None:
        """Start to write a bucket; its staging memory is free again when it has been written."""
        staged = self._staged.pop(swap.index)
        self._writes[swap.index] = self._writer.submit(
            self._write, swap.index, staged, swap.bucket, ready_event
        )

    def release(self, swap: Swap) -> None:
        """Free the staging memory of a bucket that has not changed."""
        swap.parts.result()
        self._give_back(swap.index, self._staged.pop(swap.index))

    def view_segment(self, segment: int) -> Tensor:
        """Return the bytes of a segment in a mapping of the file."""
        self._wait_for_writes()
        if self._map is None:
            self._map = mmap.mmap(self._descriptor, self._offsets[-1])
        start, end = self._offsets[segment : segment + 2]
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=start, count=end - start)

    def close(self) -> None:
        """Discard the content: stop the threads and free file and buffers."""
        self._ring.close()
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._writer.shutdown(wait=True, cancel_futures=True)
        self._map = None
        if self._descriptor >= 0:
            self._disk.close(self._descriptor)
            self._descriptor = -1

    def _wait_for_writes(self) -> None:
        self._check_writes()
        writes, self._writes = self._writes, {}
        for write in writes.values():
            write.result()

    def _check_writes(self) -> None:
        """Raise the error of a failed write again: the file has the bytes before it."""
        if self._failed_write is not None:
            raise self._failed_write

    def _take(self, index: int, num_bytes: int) -> Future[StagedBucket]:
        if index not in self._resident:
            return self._ring.take(num_bytes)
        resident: Future[StagedBucket] = Future()
        resident.set_result(self._resident[index])
        return resident

    def _give_back(self, index: int, staged: StagedBucket) -> None:
        if index not in self._resident:
            self._ring.give_back(staged)

    def _unmap(self) -> None:
        """Write the mapping's changes and drop its pages from memory."""
        if self._map is not None:
            self._attempt("written", self._map.flush)
            self._map = None
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _read(
        self, staged: StagedBucket, bucket: StateBucket, pending_write: Future[None] | None
    ) -> list[Tensor]:
        """Read a bucket, on the reader thread."""
        if pending_write is not None:
            pending_write.result()
        self._check_writes()
        parts = _split_buffer(staged.memory, bucket)
        start_seconds = time.perf_counter()
        for part, place in zip(parts, bucket.ranges, strict=True):
            position = self._offsets[place.segment] + place.offset_bytes
            data = part.numpy().data
            self._attempt("read", partial(self._disk.read_at, self._descriptor, data, position))
            self.counts.read_bytes += place.num_bytes
        self.counts.reading_seconds += time.perf_counter() - start_seconds
        return parts

    def _write(
        self,
        index: int,
        staged: StagedBucket,
        bucket: StateBucket,
        ready_event: torch.cuda.Event | None,
    ) -> None:
        """Write a bucket, on the writer thread."""
        try:
            if ready_event is not None:
                ready_event.synchronize()
            start_seconds = time.perf_counter()
            for part, place in zip(
                _split_buffer(staged.memory, bucket), bucket.ranges, strict=True
            ):
                position = self._offsets[place.segment] + place.offset_bytes
                data = part.numpy().data
                self._attempt(
                    "written", partial(self._disk.write_at, self._descriptor, data, position)
                )
                self.counts.written_bytes += place.num_bytes
            self.counts.writing_seconds += time.perf_counter() - start_seconds
        except OffloadFailed as error:
            self._failed_write = error
            raise
        finally:
            self._give_back(index, staged)

    def _attempt(self, verb: str, operation: Callable[[], None]) -> None:
        """Run a file operation; raise one error that names the folder."""
        try:
            operation()
        except OSError as error:
            raise OffloadFailed(
                f"offload.dir: the scratch file in {self._folder} could not be {verb}: "
                f"{error.strerror or error}. Saved checkpoints are intact: resume from the last one"
            ) from error


def pass_result(target: Future[_Result], source: Future[_Result]) -> None:
    """End a future as another one has ended."""
    if source.cancelled():
        target.cancel()
    elif error := source.exception():
        target.set_exception(error)
    else:
        target.set_result(source.result())


def _split_buffer(buffer: Tensor, bucket: StateBucket) -> list[Tensor]:
    return [
        buffer[place.buffer_bytes : place.buffer_bytes + place.num_bytes] for place in bucket.ranges
    ]


def allocate_buffer(num_bytes: int, *, is_pinned: bool) -> Tensor:
    """Allocate a buffer that begins on a page, as direct I/O requires."""
    if is_pinned:
        memory = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
        start = -memory.data_ptr() % PAGE_BYTES
        return memory[start : start + num_bytes]
    # numpy keeps the mapping alive; torch keeps the array.
    mapping = np.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype=np.uint8)
    memory = torch.from_numpy(mapping)
    advise_large_pages(memory)
    return memory


def advise_large_pages(memory: Tensor) -> None:
    """Ask the kernel for large pages in host memory, `[N]` bytes, before its first use.

    A request to a disk then holds more bytes, because a device limits its number of ranges, and
    the kernel has fewer pages to provide. Pages that are in use already keep their size.
    """
    start = -memory.data_ptr() % PAGE_BYTES
    if _MADV_HUGEPAGE is not None and memory.numel() - start >= _LARGE_PAGE_BYTES:
        address = ctypes.c_void_p(memory.data_ptr() + start)
        length = ctypes.c_size_t(memory.numel() - start)
        ctypes.CDLL(None).madvise(address, length, _MADV_HUGEPAGE)
