"""Staging memory of a scratch file: buckets of any size, taken in the order of their use.

A reader takes memory for one bucket after another, and a writer gives it back in about the same
order. So free memory is one range, and buckets may have the sizes that they have.

No thread waits for memory. Only training frees it, so a thread that waited would block the exit of
an interpreter whose training has failed.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock

from torch import Tensor


@dataclass(frozen=True, eq=False)
class StagedBucket:
    """Memory of one bucket, `[N]` bytes, and where it begins in the ring."""

    start: int
    memory: Tensor

    @property
    def end(self) -> int:
        """End in the ring."""
        return self.start + self.memory.numel()


class StagingRing:
    """Memory that buckets take in the order of their requests. Any thread may call all methods."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._staged: list[StagedBucket] = []
        """In the order in which they were taken."""
        self._requests: deque[tuple[int, Future[StagedBucket]]] = deque()
        """Bytes of each request that has no memory yet."""
        self._lock = Lock()

    def take(self, num_bytes: int) -> Future[StagedBucket]:
        """Request consecutive bytes. The result is there as soon as they are free.

        Callbacks of the future run in this call or in one of `give_back`.
        """
        assert num_bytes <= self._memory.numel()
        request: Future[StagedBucket] = Future()
        with self._lock:
            self._requests.append((num_bytes, request))
        self._serve()
        return request

    def give_back(self, bucket: StagedBucket) -> None:
        """Free the memory of a bucket."""
        with self._lock:
            self._staged.remove(bucket)
        self._serve()

    def close(self) -> None:
        """Cancel the requests that have no memory yet."""
        with self._lock:
            requests = list(self._requests)
            self._requests.clear()
        for _, request in requests:
            request.cancel()

    def _serve(self) -> None:
        """Give memory to the oldest requests, as far as there is some."""
        served = []
        with self._lock:
            while self._requests and (start := self._find(self._requests[0][0])) is not None:
                num_bytes, request = self._requests.popleft()
                bucket = StagedBucket(start, self._memory[start : start + num_bytes])
                self._staged.append(bucket)
                served.append((request, bucket))
        for request, bucket in served:  # their callbacks may take a lock of their own
            request.set_result(bucket)

    def _find(self, num_bytes: int) -> int | None:
        if not self._staged:
            return 0
        oldest = self._staged[0]
        newest = self._staged[-1]
        if newest.start < oldest.start:
            return newest.end if newest.end + num_bytes <= oldest.start else None
        if newest.end + num_bytes <= self._memory.numel():
            return newest.end
        return 0 if num_bytes <= oldest.start else None
