"""Staging memory of a scratch file: buckets of any size, taken in the order of their use.

A reader takes memory for one bucket after another, and a writer gives it back in about the same
order. So free memory is one range, and buckets may have the sizes that they have.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Condition

from torch import Tensor

from shardwright.errors import OffloadFailed


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
    """Memory from which one thread takes and into which any thread gives back."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._staged: list[StagedBucket] = []
        """In the order in which they were taken."""
        self._changed = Condition()
        self._is_closed = False

    def take(self, num_bytes: int) -> StagedBucket:
        """Wait until this many consecutive bytes are free, and take them.

        Raises:
            OffloadFailed: the ring was closed.
        """
        assert num_bytes <= self._memory.numel()
        with self._changed:
            while (start := self._find(num_bytes)) is None and not self._is_closed:
                self._changed.wait()
            if start is None or self._is_closed:
                raise OffloadFailed("the store was closed")
            bucket = StagedBucket(start, self._memory[start : start + num_bytes])
            self._staged.append(bucket)
            return bucket

    def give_back(self, bucket: StagedBucket) -> None:
        """Free the memory of a bucket."""
        with self._changed:
            self._staged.remove(bucket)
            self._changed.notify_all()

    def close(self) -> None:
        """Let a thread that waits for memory end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

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
