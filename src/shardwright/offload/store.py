"""Stores: memory of a slower tier that is moved in and out by buckets, asynchronously.

`HostStore` is host memory, `DiskStore` (`disk_store.py`) a scratch file. Words as in operating
systems: *swap in* is from the store to where it is used, *swap out* back to the store.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Literal, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from shardwright.offload.state_buckets import StateBucket
from shardwright.units import format_bytes

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@dataclass
class TransferCounts:
    """Bytes moved to and from a store, and the time that training waited for them."""

    read_bytes: int = 0
    written_bytes: int = 0
    waiting_seconds: float = 0.0
    """Time that training waited; transfers during its work are not included."""
    reading_seconds: float = 0.0
    """Time of the store's thread that reads, or of copies to the device."""
    writing_seconds: float = 0.0

    def subtract(self, earlier: TransferCounts) -> TransferCounts:
        """Return the counts since an earlier time."""
        return TransferCounts(
            *(
                getattr(self, field.name) - getattr(earlier, field.name)
                for field in fields(TransferCounts)
            )
        )


class TransferThreads(ThreadPoolExecutor):
    """Threads that keep no argument of a job whose result is there.

    A thread of `ThreadPoolExecutor` drops the arguments after it has set the result, whenever it
    runs next. Until then the memory of a tensor that has been moved would not be free.
    """

    def submit(
        self,
        function: Callable[_Arguments, _Result],
        /,
        *arguments: _Arguments.args,
        **options: _Arguments.kwargs,
    ) -> Future[_Result]:
        """Run a function on one of the threads."""
        jobs: list[Callable[[], _Result]] = [partial(function, *arguments, **options)]
        return super().submit(_take_and_call, jobs)


def _take_and_call(jobs: list[Callable[[], _Result]]) -> _Result:
    """Remove the job from its list, which the thread still has, and run it."""
    return jobs.pop()()


class CopyClock:
    """Times of copies on streams of a CUDA device, and of the waits of training's stream for them.

    Events in the streams measure them, so the host waits for nothing.
    """

    def __init__(self, counts: TransferCounts, device: torch.device) -> None:
        """
        Args:
            counts: receives the times.
        """
        self._counts = counts
        self._device = device
        self._spans: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        """Field of the counts, begin and end, in the order of the ends' records."""
        self._spare: list[torch.cuda.Event] = []

    def begin(self) -> torch.cuda.Event:
        """Record the begin of a copy on the current stream."""
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(
        self, field_name: Literal["reading_seconds", "writing_seconds"], begin: torch.cuda.Event
    ) -> torch.cuda.Event:
        """Return the event at the end of a copy, on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._spans.append((field_name, begin, event))
        return event

    @contextmanager
    def time_wait(self) -> Iterator[None]:
        """Measure how long the current stream waits for what the block lets it wait for."""
        begin = self.begin()
        yield
        self._spans.append(("waiting_seconds", begin, self.begin()))

    def wait(self, event: torch.cuda.Event, _memory: object = None) -> None:
        """Make the current stream wait for an event, and measure how long.

        A wait that is bound to `_memory` keeps that alive until then.
        """
        with self.time_wait():
            torch.cuda.current_stream(self._device).wait_event(event)

    def collect(self) -> TransferCounts:
        """Return the counts, with the times of all that has ended."""
        while self._spans and self._spans[0][2].query():
            field_name, begin, end = self._spans.popleft()
            seconds = getattr(self._counts, field_name) + begin.elapsed_time(end) / 1000.0
            setattr(self._counts, field_name, seconds)
            self._spare.append(begin)
            if field_name == "waiting_seconds":  # others may wait for the end of a copy
                self._spare.append(end)
        return self._counts


class TransferReporter:
    """Differences of a store's counts between calls."""

    def __init__(self) -> None:
        self._reported = TransferCounts()

    def take(self, counts: TransferCounts) -> TransferCounts:
        """Return bytes and times since the previous call."""
        since = counts.subtract(self._reported)
        self._reported = replace(counts)
        return since


def describe_transfers(counts: TransferCounts, num_steps: int, subject: str = "states") -> str:
    """Describe the transfers of a run in one line, with the share that work has hidden.

    Moments in host memory that the host updates have no times: they do not move.
    """
    line = f"offload: {format_bytes(counts.read_bytes / num_steps)} of {subject} read"
    rates = []
    if counts.reading_seconds:
        rates.append(f"{format_bytes(counts.read_bytes / counts.reading_seconds)}/s")
    if counts.written_bytes:
        line += f" and {format_bytes(counts.written_bytes / num_steps)} written"
    if counts.writing_seconds:
        rates.append(f"{format_bytes(counts.written_bytes / counts.writing_seconds)}/s")
    line += " per step"
    if not rates:
        return line
    # Both directions run at the same time.
    seconds = max(counts.reading_seconds, counts.writing_seconds)
    hidden = max(0.0, 1.0 - counts.waiting_seconds / seconds)
    return f"{line}, at {' and '.join(rates)}; {hidden:.0%} of the transfer time was hidden"


@dataclass(frozen=True)
class Swap:
    """A bucket that is being swapped in, or that has been."""

    index: int
    bucket: StateBucket
    parts: Future[list[Tensor]]
    """Bytes of the bucket's ranges in host memory; views of the store, or of staging memory."""


class Store(Protocol):
    """Bytes in segments. One thread calls all methods."""

    tier: Literal["host", "disk"]

    @property
    def counts(self) -> TransferCounts:
        """Bytes and times of all transfers so far."""
        ...

    capacity_bytes: int
    """Bytes of buckets whose swaps may be open at the same time: a further one begins when enough
    are closed."""
    resident_buckets: Collection[int]
    """Buckets that have memory of their own besides. Their swaps may stay open between updates."""

    def swap_in(self, index: int, bucket: StateBucket) -> Swap:
        """Start to bring a bucket to host memory."""
        ...

    def swap_out(self, swap: Swap, ready_event: torch.cuda.Event | None = None) -> None:
        """Start to write a bucket back, once the event is reached, and close the swap."""
        ...

    def release(self, swap: Swap) -> None:
        """Close the swap of a bucket that has not changed."""
        ...

    def view_segment(self, segment: int) -> Tensor:
        """Return the bytes of a segment, for reading and writing, valid until the next swap.

        Waits for all pending writes. No swap may be open.
        """
        ...

    def close(self) -> None:
        """Discard the content and free everything."""
        ...


def wait_for_parts(store: Store, swap: Swap) -> list[Tensor]:
    """Wait until a bucket has arrived in host memory and count the time."""
    start_seconds = time.perf_counter()
    parts = swap.parts.result()
    store.counts.waiting_seconds += time.perf_counter() - start_seconds
    return parts


@dataclass
class HostStore:
    """Host memory, pinned if the device is a GPU, so that copies run during computation.

    Segments are used where they are; nothing is copied in host memory.
    """

    segments: list[Tensor]
    tier: Literal["host", "disk"] = "host"
    capacity_bytes: int = 1 << 62
    resident_buckets: Collection[int] = ()
    counts: TransferCounts = field(default_factory=TransferCounts)
    _swaps: dict[int, Swap] = field(default_factory=dict)
    """Swaps of buckets, which are the same in every update."""

    @classmethod
    def allocate(
        cls, segment_bytes: Sequence[int], *, is_pinned: bool, capacity_bytes: int = 1 << 62
    ) -> HostStore:
        """Allocate zeros. PyTorch rounds each pinned segment up to a power of two."""
        return cls(
            [torch.zeros(size, dtype=torch.uint8, pin_memory=is_pinned) for size in segment_bytes],
            capacity_bytes=capacity_bytes,
        )

    def swap_in(self, index: int, bucket: StateBucket) -> Swap:
        """Return the bucket, which is in host memory already."""
        self.counts.read_bytes += bucket.num_bytes
        swap = self._swaps.get(index)
        if swap is None:
            parts: Future[list[Tensor]] = Future()
            parts.set_result(
                [
                    self.segments[place.segment].narrow(0, place.offset_bytes, place.num_bytes)
                    for place in bucket.ranges
                ]
            )
            swap = self._swaps[index] = Swap(index, bucket, parts)
        return swap

    def swap_out(self, swap: Swap, ready_event: torch.cuda.Event | None = None) -> None:
        """Count the bytes of the segments, which updates and device copies have written."""
        self.counts.written_bytes += swap.bucket.num_bytes

    def release(self, swap: Swap) -> None:
        """Nothing has to be freed."""

    def view_segment(self, segment: int) -> Tensor:
        """Return a segment. Copies from a device must have ended."""
        return self.segments[segment]

    def close(self) -> None:
        """Free the memory."""
        self.segments = []
        self._swaps.clear()
