"""Stores of saved tensors: bytes that leave the device and return, in any order.

Both copy whole storages. `PinnedStore` uses host memory and two copy streams of a CUDA device;
`ScratchStore` a scratch file with a thread for each direction.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.checkpoint.disk import LOCAL_DISK, Disk
from shardwright.offload.scratch_transfers import ScratchTransfers
from shardwright.offload.state_buckets import round_to_pages
from shardwright.offload.store import CopyClock, TransferCounts

Wait = Callable[[], None]
"""Makes training wait for a copy: its stream on CUDA, or the host."""


class ActivationStore(Protocol):
    """Memory of a slower tier. Copies run during training until `Wait` is called."""

    @property
    def counts(self) -> TransferCounts:
        """Bytes and times of all transfers so far."""
        ...

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
        self._counts = TransferCounts()
        self._clock = CopyClock(self._counts, device)
        self._device = device
        self._stream_in = torch.cuda.Stream(device)
        self._stream_out = torch.cuda.Stream(device)
        self._free: list[Tensor] = []
        """Free memory, the smallest first."""

    @property
    def counts(self) -> TransferCounts:
        """Bytes and times of all transfers that have ended."""
        return self._clock.collect()

    def write(self, data: Tensor) -> tuple[Tensor, Wait]:
        """Copy to memory of a freed tensor, or to new memory."""
        place = self._allocate(data.numel())
        self._stream_out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream_out):
            begin = self._clock.begin()
            place[: data.numel()].copy_(data, non_blocking=True)
            copied = self._clock.end("writing_seconds", begin)
        self._counts.written_bytes += data.numel()
        return place, partial(self._clock.wait, copied)

    def _allocate(self, num_bytes: int) -> Tensor:
        """Return the smallest free buffer of at least this size and at most twice it, or a new one.

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
            begin = self._clock.begin()
            data.copy_(place[:num_bytes], non_blocking=True)
            copied = self._clock.end("reading_seconds", begin)
        self._counts.read_bytes += num_bytes
        return data, partial(self._clock.wait, copied)

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


class ScratchStore(ScratchTransfers):
    """Scratch file without a name on a local disk; direct I/O through one buffer per direction."""

    _FILE = "offload.activations: the scratch file"
    _REMEDY = "Saved checkpoints are intact: resume from the last one"

    def __init__(
        self, folder: Path, buffer_bytes: int, device: torch.device, *, disk: Disk = LOCAL_DISK
    ) -> None:
        """Create the file, which grows with the tensors that are in it at the same time.

        Raises:
            OffloadFailed: the folder cannot be written.
        """
        super().__init__(folder, buffer_bytes, device, disk, "activation")
        self._size_bytes = 0
        self._free: dict[int, list[int]] = {}
        """Offsets of free regions by size."""
        self._attempt("created", self._create)

    def _create(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = self._disk.create_scratch(self._folder)
        self._disk.bypass_cache(self._descriptor, True)

    def write(self, data: Tensor) -> tuple[_Region, Wait]:
        """Write to a free region of the same size, or at the end of the file."""
        size_bytes = round_to_pages(data.numel())
        free = self._free.get(size_bytes)
        if free:
            offset_bytes = free.pop()
        else:
            offset_bytes = self._size_bytes
            self._size_bytes += size_bytes
            self._attempt(
                "enlarged",
                partial(self._disk.reserve, self._descriptor, size_bytes, offset_bytes),
            )
        job = self._start_write(offset_bytes, data)
        return _Region(offset_bytes, size_bytes, [job]), lambda: self._wait(job)

    def read(self, place: _Region, num_bytes: int) -> tuple[Tensor, Wait]:
        """Read a region whose write has been waited for."""
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        job = self._start_read(place.offset_bytes, data)
        place.jobs.append(job)
        return data, lambda: self._wait(job)

    def free(self, place: _Region) -> None:
        """Make a region available when its last operation has ended."""
        place.jobs[-1].add_done_callback(
            lambda _job: self._free.setdefault(place.size_bytes, []).append(place.offset_bytes)
        )
