"""Staging buffers on a CUDA device, filled and emptied on copy streams of their own.

[Note: order of copies] The update of a bucket runs on the current stream: training's, or that of an
update that overlaps with passes. It waits for the copy that fills its buffer. The copy that empties
the buffer waits for the update, and a buffer is filled again only after that copy. So is a bucket
that the next update needs: its copy waits until the host memory has the bytes of this one. The
host waits for none of them. At the end of a step the update's stream waits for the last copy to
host memory. Code that synchronises with it therefore finds the host memory complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.offload.state_buckets import StateBucket
from shardwright.offload.store import CopyClock


@dataclass
class _DeviceBuffer:
    memory: Tensor
    emptied: torch.cuda.Event | None = None


@dataclass(frozen=True)
class _FilledBuffer:
    buffer: _DeviceBuffer
    parts: list[Tensor]
    """Bytes of the bucket's ranges."""
    copied: torch.cuda.Event


class DeviceBuffers:
    """Ring of staging buffers with one stream in and one stream out."""

    def __init__(
        self,
        buffer_bytes: int,
        num_buffers: int,
        device: torch.device,
        clock: CopyClock,
        *,
        is_on_training_stream: bool = True,
    ) -> None:
        """
        Args:
            clock: measures copies, and waits for them on training's stream.
            is_on_training_stream: True if updates run on training's stream.
        """
        self._device = device
        self._clock = clock
        self._is_on_training_stream = is_on_training_stream
        self._free = deque(
            _DeviceBuffer(torch.empty(buffer_bytes, dtype=torch.uint8, device=device))
            for _ in range(num_buffers)
        )
        """Buffers in the order in which they will be empty."""
        self._filled: dict[int, _FilledBuffer] = {}
        """Buckets on the device, or on their way there, in the order of the update."""
        self._written: dict[int, torch.cuda.Event] = {}
        """End of the last copy of each bucket to host memory."""
        self._stream_in = torch.cuda.Stream(device)
        self._stream_out = torch.cuda.Stream(device)
        for buffer in self._free:  # whenever it is freed, copies may use it
            buffer.memory.record_stream(self._stream_in)
            buffer.memory.record_stream(self._stream_out)
        # The memory may have been that of tensors which the current stream still uses.
        self._stream_in.wait_stream(torch.cuda.current_stream(device))

    @property
    def num_free(self) -> int:
        """Number of buffers that can be filled."""
        return len(self._free)

    @property
    def filled(self) -> list[int]:
        """Buckets that are on the device, or on their way there, in order."""
        return list(self._filled)

    def fill(self, index: int, bucket: StateBucket, parts: Sequence[Tensor]) -> None:
        """Launch the copy of a bucket to the next free buffer."""
        buffer = self._free.popleft()
        targets = [
            buffer.memory[place.buffer_bytes : place.buffer_bytes + place.num_bytes]
            for place in bucket.ranges
        ]
        with torch.cuda.stream(self._stream_in):
            for event in (buffer.emptied, self._written.get(index)):
                if event is not None:
                    self._stream_in.wait_event(event)
            begin = self._clock.begin()
            for target, part in zip(targets, parts, strict=True):
                target.copy_(part, non_blocking=True)
            copied = self._clock.end("reading_seconds", begin)
        self._filled[index] = _FilledBuffer(buffer, targets, copied)

    def open(self, index: int) -> list[Tensor]:
        """Make the current stream wait for the copy of a bucket; return its parts on the device."""
        filled = self._filled[index]
        with self._time_wait():
            torch.cuda.current_stream(self._device).wait_event(filled.copied)
        return filled.parts

    def empty(self, index: int, parts: Sequence[Tensor]) -> torch.cuda.Event:
        """Launch the copy of a bucket to host memory; return the event at its end."""
        filled = self._filled.pop(index)
        self._stream_out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream_out):
            begin = self._clock.begin()
            for source, part in zip(filled.parts, parts, strict=True):
                part.copy_(source, non_blocking=True)
            event = self._clock.end("writing_seconds", begin)
        filled.buffer.emptied = self._written[index] = event
        self._free.append(filled.buffer)
        return event

    def discard(self) -> None:
        """Give up filled buffers, whose bytes in host memory may change."""
        self._free.extendleft(filled.buffer for filled in reversed(self._filled.values()))
        self._filled.clear()

    def end_step(self) -> None:
        """Make the current stream wait for the last copy to host memory."""
        with self._time_wait():
            torch.cuda.current_stream(self._device).wait_stream(self._stream_out)

    def _time_wait(self) -> AbstractContextManager[None]:
        return self._clock.time_wait() if self._is_on_training_stream else nullcontext()

    def synchronize(self) -> None:
        """Wait until nothing reads the host memory, and it is complete."""
        for stream in (self._stream_in, self._stream_out):
            torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.current_stream(self._device).synchronize()
