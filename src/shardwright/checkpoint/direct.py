"""Large files, written past the system's page cache where the file system can (O_DIRECT). No torch.

Through the page cache every byte is copied once more, by the core that training and hashing want, and pushes something out that
will be read again. A checkpoint is not read again soon.
"""

from __future__ import annotations

import itertools
import mmap

import numpy as np

from shardwright.checkpoint.disk import Disk, HashedFile
from shardwright.checkpoint.place import BLOCK_BYTES, Place

LARGE_BYTES = 4 * BLOCK_BYTES
"""From this size on; below it the page cache takes the bytes faster than any device."""


class DirectFile(HashedFile):
    """A `HashedFile` that gathers what it is given into whole, aligned blocks, as the device wants them.

    While one of two blocks is filled, the other may still be hashed. What does not fill a block at the end goes through the cache.
    """

    def __init__(self, path: Place, disk: Disk) -> None:
        super().__init__(path, disk)
        # Anonymous maps begin at a page; numpy copies into them without the interpreter's lock.
        blocks = [np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), dtype=np.uint8) for _ in range(2)]
        self._blocks = itertools.cycle(blocks)
        self._block_N, self._filled = next(self._blocks), 0
        disk.bypass_cache(self._descriptor, True)

    def write(self, data: memoryview) -> None:
        """Append bytes, which may change as soon as this returns."""
        data_N = np.frombuffer(data, dtype=np.uint8)
        while data_N.size:
            count = min(data_N.size, BLOCK_BYTES - self._filled)
            self._block_N[self._filled : self._filled + count] = data_N[:count]
            self._filled, data_N = self._filled + count, data_N[count:]
            if self._filled == BLOCK_BYTES:
                self._hand_on()

    def finish(self) -> str:
        """Bring everything to the device; returns the SHA-256 in hexadecimal."""
        if self._filled:
            self._disk.bypass_cache(self._descriptor, False)
            self._hand_on()
        return super().finish()

    def _hand_on(self) -> None:
        super().write(self._block_N[: self._filled].data)
        self._block_N, self._filled = next(self._blocks), 0


def new_file(path: Place, disk: Disk, size_bytes: int) -> HashedFile:
    """A new file that will hold so many bytes."""
    return (DirectFile if size_bytes >= LARGE_BYTES else HashedFile)(path, disk)
