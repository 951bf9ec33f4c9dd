"""Staging buffers on a CUDA device, filled and emptied on copy streams of their own.

[Note: order of copies] The update of a bucket runs on the current stream: training's, or that of an
update that overlaps with passes. It waits for the copy that `copy_in` launches. The copy that
`copy_out` launches waits for the update, and a buffer is filled again only after that copy. The
host waits for none of them. At the end of a step the update's stream waits for the last copy to
host memory. Code that synchronises with it therefore finds the host memory complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.offload.state_buckets import StateBucket

NUM_BUFFERS = 3
"""Number of buffers: at any time one is filled, one updated and one emptied."""


@dataclass
class _DeviceBuffer:
    memory: Tensor
    emptied: torch.cuda.Event | None = None


class DeviceBuffers:
    """Ring of staging buffers with one stream in and one stream out."""

    def __init__(self, buffer_bytes: int, device: torch.device) -> None:
        self._device = device
        self._ring = [
            _DeviceBuffer(torch.empty(buffer_bytes, dtype=torch.uint8, device=device))
            for _ in range(NUM_BUFFERS)
        ]
        self._position = 0
        self._stream_in = torch.cuda.Stream(device)
        self._stream_out = torch.cuda.Stream(device)

    def begin_step(self) -> None:
        """Make the copies wait for all work that the current stream has so far."""
        self._stream_in.wait_stream(torch.cuda.current_stream(self._device))

    def copy_in(self, bucket: StateBucket, parts: Sequence[Tensor]) -> list[Tensor]:
        """Launch the copy of a bucket to the next buffer; return its parts on the device."""
        buffer = self._ring[self._position]
        targets = [
            buffer.memory[place.buffer_bytes : place.buffer_bytes + place.num_bytes]
            for place in bucket.ranges
        ]
        with torch.cuda.stream(self._stream_in):
            if buffer.emptied is not None:
                self._stream_in.wait_event(buffer.emptied)
            for target, part in zip(targets, parts, strict=True):
                target.copy_(part, non_blocking=True)
            copied = self._stream_in.record_event()
        torch.cuda.current_stream(self._device).wait_event(copied)
        return targets

    def copy_out(self, sources: Sequence[Tensor], parts: Sequence[Tensor]) -> torch.cuda.Event:
        """Launch the copy of the last buffer to host memory; return the event at its end."""
        buffer = self._ring[self._position]
        self._position = (self._position + 1) % len(self._ring)
        self._stream_out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream_out):
            for source, part in zip(sources, parts, strict=True):
                part.copy_(source, non_blocking=True)
            buffer.emptied = self._stream_out.record_event()
        return buffer.emptied

    def end_step(self) -> None:
        """Make the current stream wait for the last copy to host memory."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream_out)

    def synchronize(self) -> None:
        """Wait until the host memory is complete."""
        torch.cuda.current_stream(self._device).synchronize()
