"""Stores of saved tensors: bytes that leave the device and return, in any order.

Both copy whole storages. `PinnedStore` uses host memory and two copy streams of a CUDA device;
`ScratchStore` a scratch file with a thread for each direction.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.checkpoint.disk import LOCAL_DISK, Disk
from shardwright.errors import OffloadFailed
from shardwright.offload.disk_store import allocate_buffer
from shardwright.offload.state_buckets import PAGE_BYTES
from shardwright.offload.store import TransferCounts

Wait = Callable[[], None]
"""Makes training wait for a copy: its stream on CUDA, or the host."""


class ActivationStore(Protocol):
    """Memory of a slower tier. Copies run beside training until `Wait` is called."""

    counts: TransferCounts

    def write(self, data: Tensor) -> tuple[Any, Wait]:
        """Start to copy bytes `[N]` from the device; return their place.

        The bytes must not be freed or changed before the wait.
        """
        ...

    def read(self, place: Any, num_bytes: int) -> tuple[Tensor, Wait]:
        """Start to copy bytes back to the device, `[N]`; they are valid after the wait."""
        ...

    def free(self, place: Any) -> None:
        """Free a place. Its copies must have been waited for, or it must be unused after them."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


class PinnedStore:
    """Pinned host memory of a CUDA device. The host waits for no copy."""

    def __init__(self, device: torch.device) -> None:
        self.counts = TransferCounts()
        self._device = device
        self._stream_in = torch.cuda.Stream(device)
        self._stream_out = torch.cuda.Stream(device)
        self._free: list[Tensor] = []
        """Free memory, the smallest first."""

    def write(self, data: Tensor) -> tuple[Tensor, Wait]:
        """Copy to memory of a freed tensor, or to new memory."""
        place = self._allocate(data.numel())
        self._stream_out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream_out):
            place[: data.numel()].copy_(data, non_blocking=True)
            copied = self._stream_out.record_event()
        self.counts.written_bytes += data.numel()
        return place, lambda: torch.cuda.current_stream(self._device).wait_event(copied)

    def _allocate(self, num_bytes: int) -> Tensor:
        """Return the smallest free memory of at most twice the size, or new memory.

        Allocation of pinned memory takes milliseconds, so freed memory is kept.
        """
        index = bisect_left(self._free, num_bytes, key=Tensor.numel)
        if index < len(self._free) and self._free[index].numel() <= 2 * num_bytes:
            return self._free.pop(index)
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def read(self, place: Tensor, num_bytes: int) -> tuple[Tensor, Wait]:
        """Copy to new device memory, once the kernels that used it before have ended."""
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._stream_in.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream_in):
            data.copy_(place[:num_bytes], non_blocking=True)
            copied = self._stream_in.record_event()
        self.counts.read_bytes += num_bytes
        return data, lambda: torch.cuda.current_stream(self._device).wait_event(copied)

    def free(self, place: Tensor) -> None:
        """Keep the memory for a later write, which waits for training and so for its copies."""
        insort(self._free, place, key=Tensor.numel)

    def close(self) -> None:
        """Free the memory."""
        self._free.clear()


@dataclass(frozen=True)
class _Region:
    offset_bytes: int
    size_bytes: int
    jobs: list[Future[None]]
    """Its transfers, in their order."""


class ScratchStore:
    """Scratch file without a name on a local disk; direct I/O through one buffer per direction."""

    def __init__(
        self, folder: Path, buffer_bytes: int, device: torch.device, *, disk: Disk = LOCAL_DISK
    ) -> None:
        """Create the file, which grows with the tensors that are in it at the same time.

        Raises:
            OffloadFailed: the folder cannot be written.
        """
        self.counts = TransferCounts()
        self._folder = folder
        self._disk = disk
        self._device = device
        self._descriptor = -1
        self._size_bytes = 0
        self._free: dict[int, list[int]] = {}
        """Offsets of free regions by size."""
        is_pinned = device.type == "cuda"
        self._buffers = [allocate_buffer(buffer_bytes, is_pinned=is_pinned) for _ in range(2)]
        self._streams = [torch.cuda.Stream(device) if is_pinned else None for _ in range(2)]
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="activation-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="activation-write")
        self._attempt("created", self._create)

    def _create(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = self._disk.create_scratch(self._folder)
        self._disk.bypass_cache(self._descriptor, True)

    def write(self, data: Tensor) -> tuple[_Region, Wait]:
        """Write to a free region of the same size, or at the end of the file."""
        size_bytes = -(-data.numel() // PAGE_BYTES) * PAGE_BYTES
        free = self._free.get(size_bytes)
        if free:
            offset_bytes = free.pop()
        else:
            offset_bytes = self._size_bytes
            self._size_bytes += size_bytes
            self._attempt(
                "enlarged", lambda: os.posix_fallocate(self._descriptor, offset_bytes, size_bytes)
            )
        ready = self._record_event()
        job = self._writer.submit(self._write, data, offset_bytes, ready)
        return _Region(offset_bytes, size_bytes, [job]), lambda: self._wait(job)

    def read(self, place: _Region, num_bytes: int) -> tuple[Tensor, Wait]:
        """Read a region whose write has been waited for."""
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        job = self._reader.submit(self._read, data, place.offset_bytes, self._record_event())
        place.jobs.append(job)
        return data, lambda: self._wait(job)

    def free(self, place: _Region) -> None:
        """Make a region available when its last operation has ended."""
        place.jobs[-1].add_done_callback(
            lambda _job: self._free.setdefault(place.size_bytes, []).append(place.offset_bytes)
        )

    def close(self) -> None:
        """Stop the threads and free the file."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._writer.shutdown(wait=True, cancel_futures=True)
        if self._descriptor >= 0:
            self._disk.close(self._descriptor)
            self._descriptor = -1

    def _record_event(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        return torch.cuda.current_stream(self._device).record_event()

    def _wait(self, job: Future[None]) -> None:
        start_seconds = time.perf_counter()
        job.result()
        self.counts.waiting_seconds += time.perf_counter() - start_seconds

    def _write(self, data: Tensor, offset_bytes: int, ready: torch.cuda.Event | None) -> None:
        start_seconds = time.perf_counter()
        buffer = self._buffers[0]
        for start in range(0, data.numel(), buffer.numel()):
            piece = data[start : start + buffer.numel()]
            self._copy(buffer[: piece.numel()], piece, self._streams[0], ready)
            part = buffer[: -(-piece.numel() // PAGE_BYTES) * PAGE_BYTES].numpy().data
            position = offset_bytes + start
            self._attempt(
                "written",
                lambda part=part, position=position: self._disk.write_at(  # type: ignore[misc]
                    self._descriptor, part, position
                ),
            )
        self.counts.written_bytes += data.numel()
        self.counts.writing_seconds += time.perf_counter() - start_seconds

    def _read(self, data: Tensor, offset_bytes: int, ready: torch.cuda.Event | None) -> None:
        start_seconds = time.perf_counter()
        buffer = self._buffers[1]
        for start in range(0, data.numel(), buffer.numel()):
            piece = data[start : start + buffer.numel()]
            part = buffer[: -(-piece.numel() // PAGE_BYTES) * PAGE_BYTES].numpy().data
            position = offset_bytes + start
            self._attempt(
                "read",
                lambda part=part, position=position: self._disk.read_at(  # type: ignore[misc]
                    self._descriptor, part, position
                ),
            )
            self._copy(piece, buffer[: piece.numel()], self._streams[1], ready)
        self.counts.read_bytes += data.numel()
        self.counts.reading_seconds += time.perf_counter() - start_seconds

    @staticmethod
    def _copy(
        target: Tensor,
        source: Tensor,
        stream: torch.cuda.Stream | None,
        ready: torch.cuda.Event | None,
    ) -> None:
        """Copy on a store's thread, which waits for the copy."""
        if stream is None or ready is None:
            target.copy_(source)
            return
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            target.copy_(source, non_blocking=True)
        stream.synchronize()

    def _attempt(self, verb: str, operation: Callable[[], None]) -> None:
        """Run a file operation; raise one error that names the folder."""
        try:
            operation()
        except OSError as error:
            raise OffloadFailed(
                f"offload.activations: the scratch file in {self._folder} could not be {verb}: "
                f"{error.strerror or error}. The last checkpoint is intact: resume from it"
            ) from error
