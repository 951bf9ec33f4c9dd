"""Pinned host memory of trained weights and their gradients, for a CUDA device.

[Note: order of copies] Copies to the device and from it have a stream each. A copy begins when what
training has launched before has ended, and one to the device also waits for the copies from the
device that write the same bytes. Training's stream waits for a copy where the caller waits; the
host waits for none, but for checkpoints.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from shardwright.offload.activation_store import Wait
from shardwright.offload.state_buckets import PAGE_BYTES
from shardwright.offload.store import CopyClock, TransferCounts


@dataclass
class _Place:
    """Memory of one place, and the end of the last copy to each offset."""

    first: int
    memory: Tensor
    written: dict[int, tuple[int, torch.cuda.Event]] = field(default_factory=dict)
    """Number of bytes and event, by offset."""


class PinnedParameterStore:
    """Bytes of weights and gradients in pinned host memory. One thread calls all methods."""

    def __init__(self, device: torch.device) -> None:
        self._counts = TransferCounts()
        self._clock = CopyClock(self._counts, device)
        self.num_bytes = 0
        """Bytes of all places."""
        self._device = device
        self._places: list[_Place] = []
        self._stream_in = torch.cuda.Stream(device)
        self._stream_out = torch.cuda.Stream(device)

    @property
    def counts(self) -> TransferCounts:
        """Bytes and times of all transfers that have ended."""
        return self._clock.collect()

    def add(self, num_bytes: int) -> int:
        """Allocate a place of zeros; return its first byte. PyTorch rounds its size up to a power
        of two."""
        first = self.num_bytes
        size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        if size:
            memory = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
            self._places.append(_Place(first, memory))
        self.num_bytes += size
        return first

    def fill(self, position: int, pieces: Iterable[Tensor]) -> None:
        """Copy consecutive pieces of bytes, each `[N]` in host memory."""
        for piece in pieces:
            _, target = self._find(position, piece.numel())
            target.copy_(piece)
            position += piece.numel()

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocate bytes on the device, `[N]`."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def read(self, position: int, target: Tensor) -> Wait:
        """Launch the copy of bytes to `target`, `[N]`; training's stream has them after the
        wait."""
        place, source = self._find(position, target.numel())
        offset = position - place.first
        self._stream_in.wait_stream(torch.cuda.current_stream(self._device))
        for start, (count, written) in place.written.items():
            if start < offset + target.numel() and start + count > offset:
                self._stream_in.wait_event(written)
        with torch.cuda.stream(self._stream_in):
            begin = self._clock.begin()
            target.copy_(source, non_blocking=True)
            copied = self._clock.end("reading_seconds", begin)
        self._counts.read_bytes += target.numel()
        return partial(self._clock.wait, copied)

    def write(self, position: int, source: Tensor) -> Wait:
        """Launch the copy of `source`, contiguous; it may change after the wait, which keeps its
        memory."""
        data = source.detach().view(-1).view(torch.uint8)
        place, target = self._find(position, data.numel())
        self._stream_out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream_out):
            begin = self._clock.begin()
            target.copy_(data, non_blocking=True)
            copied = self._clock.end("writing_seconds", begin)
        place.written[position - place.first] = (data.numel(), copied)
        self._counts.written_bytes += data.numel()
        return partial(self._clock.wait, copied, data)

    def synchronise(self) -> None:
        """Make the host wait for all copies."""
        for stream in (self._stream_in, self._stream_out):
            if not stream.query():
                stream.synchronize()

    def view(self, position: int, num_bytes: int) -> Tensor:
        """Return the memory of bytes, for reading and writing, valid until their next transfer.

        Copies of them must have ended (`synchronise`).
        """
        _, found = self._find(position, num_bytes)
        return found

    def close(self) -> None:
        """Wait for all copies and free the memory."""
        self.synchronise()
        self._places.clear()

    def _find(self, position: int, num_bytes: int) -> tuple[_Place, Tensor]:
        index = bisect_right(self._places, position, key=lambda place: place.first) - 1
        place = self._places[index]
        offset = position - place.first
        assert offset + num_bytes <= place.memory.numel(), "bytes of two places"
        return place, place.memory[offset : offset + num_bytes]
