"""Large files, written past the system's page cache where the file system can (O_DIRECT). No torch.

Through the page cache every byte is copied once more, by the core that training and hashing want, and pushes something out that
will be read again. A checkpoint is not read again soon.
"""

from __future__ import annotations

import itertools
import mmap
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from shardwright.checkpoint.disk import Disk, HashedFile
from shardwright.checkpoint.place import BLOCK_BYTES, Place

if TYPE_CHECKING:
    from types import TracebackType

LARGE_BYTES = 4 * BLOCK_BYTES
"""From this size on; below it the page cache takes the bytes faster than any device."""
_PART_BYTES = BLOCK_BYTES // 2
_NUM_PARTS = 3
"""One is filled, one is hashed, one is written."""


_spare: list[np.ndarray] = []
"""Memory of files that are done, for those to come: fresh memory costs a page fault every 4 KiB."""


def _take_memory() -> np.ndarray:
    """Aligned memory: an anonymous map begins at a page. numpy copies into it without the interpreter's lock."""
    try:
        return _spare.pop()
    except IndexError:
        return np.frombuffer(mmap.mmap(-1, _PART_BYTES), dtype=np.uint8)


@dataclass
class _Part:
    """Memory on its way to the device."""

    memory_N: np.ndarray = field(default_factory=_take_memory)
    under_way: list[Future[None]] = field(default_factory=list)

    def vacate(self) -> None:
        """Wait until it has been hashed and written, and raise what either met."""
        for task in self.under_way:
            task.result()
        self.under_way.clear()


class DirectFile(HashedFile):
    """A `HashedFile` that gathers what it is given into whole, aligned parts, as the device wants them.

    One thread hashes, one writes, and the caller fills the next part meanwhile: the device is never without work. What does not
    fill a part at the end goes through the cache.
    """

    def __init__(self, path: Place, disk: Disk) -> None:
        super().__init__(path, disk)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-write")
        self._parts = [_Part() for _ in range(_NUM_PARTS)]
        self._next = itertools.cycle(self._parts)
        self._part, self._filled = next(self._next), 0
        disk.bypass_cache(self._descriptor, True)

    def write(self, data: memoryview) -> None:
        """Append bytes, which may change as soon as this returns; an error may come with a later call, `finish` at the latest."""
        data_N = np.frombuffer(data, dtype=np.uint8)
        self.size_bytes += data_N.size
        while data_N.size:
            count = min(data_N.size, _PART_BYTES - self._filled)
            self._part.memory_N[self._filled : self._filled + count] = data_N[:count]
            self._filled, data_N = self._filled + count, data_N[count:]
            if self._filled == _PART_BYTES:
                self._hand_on()

    def finish(self) -> str:
        """Bring everything to the device; returns the SHA-256 in hexadecimal."""
        if self._filled:
            self._writer.submit(self._disk.bypass_cache, self._descriptor, False).result()
            self._hand_on()
        for part in self._parts:
            part.vacate()
        return super().finish()

    def _hand_on(self) -> None:
        data = self._part.memory_N[: self._filled].data
        hashing = self._pool.submit(self._digest.update, data)
        self._part.under_way += [hashing, self._writer.submit(self._disk.write, self._descriptor, data)]
        self._part, self._filled = next(self._next), 0
        self._part.vacate()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._writer.shutdown(wait=True, cancel_futures=True)
        super().__exit__(kind, error, trace)
        _spare.extend(part.memory_N for part in self._parts)


def new_file(path: Place, disk: Disk, size_bytes: int) -> HashedFile:
    """A new file that will hold so many bytes."""
    return (DirectFile if size_bytes >= LARGE_BYTES else HashedFile)(path, disk)
