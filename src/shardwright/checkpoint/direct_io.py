"""Writing of large files past the page cache (O_DIRECT), where supported. No torch.

The page cache costs one more copy of every byte, on a core that training and hashing need, and
evicts data that will be read again. A checkpoint is not read again soon.
"""

from __future__ import annotations

import itertools
import mmap
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from shardwright.checkpoint.disk import Disk, HashedFile
from shardwright.checkpoint.storage_path import BLOCK_BYTES, StoragePath

if TYPE_CHECKING:
    from types import TracebackType

LARGE_BYTES = 4 * BLOCK_BYTES
"""Smallest file written past the page cache, which is faster for smaller files."""
_BLOCK_PART_BYTES = BLOCK_BYTES // 2
_NUM_PARTS = 3
"""Number of buffers: one is filled, one hashed, one written."""


_free_blocks: list[np.ndarray] = []
"""Buffers of finished files, reused because new memory costs a page fault every 4 KiB."""


def _allocate_block() -> np.ndarray:
    """Return a page-aligned buffer; numpy copies into it without the interpreter lock."""
    try:
        return _free_blocks.pop()
    except IndexError:
        return np.frombuffer(mmap.mmap(-1, _BLOCK_PART_BYTES), dtype=np.uint8)


@dataclass
class _DirectBlock:
    """Buffer with its pending hash and write tasks."""

    memory_N: np.ndarray = field(default_factory=_allocate_block)
    pending: list[Future[None]] = field(default_factory=list)

    def wait_until_free(self) -> None:
        """Wait until the buffer has been hashed and written; raise the error of either."""
        for task in self.pending:
            task.result()
        self.pending.clear()


class DirectFile(HashedFile):
    """`HashedFile` that collects data in aligned buffers of fixed size, as O_DIRECT requires.

    One thread hashes and one writes while the caller fills the next buffer, so the device is
    never idle. The last, partly filled buffer goes through the page cache.
    """

    def __init__(self, path: StoragePath, disk: Disk) -> None:
        super().__init__(path, disk)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-write")
        self._parts = [_DirectBlock() for _ in range(_NUM_PARTS)]
        self._next = itertools.cycle(self._parts)
        self._part = next(self._next)
        self._num_filled_bytes = 0
        disk.bypass_cache(self._descriptor, True)

    def write(self, data: memoryview) -> None:
        """Append bytes. The caller may change them once this returns.

        Errors are raised by a later call, at the latest by `finish`.
        """
        data_N = np.frombuffer(data, dtype=np.uint8)
        self.size_bytes += data_N.size
        while data_N.size:
            count = min(data_N.size, _BLOCK_PART_BYTES - self._num_filled_bytes)
            self._part.memory_N[self._num_filled_bytes : self._num_filled_bytes + count] = data_N[
                :count
            ]
            self._num_filled_bytes += count
            data_N = data_N[count:]
            if self._num_filled_bytes == _BLOCK_PART_BYTES:
                self._submit_part()

    def finish(self) -> str:
        """Sync the file to the device and return its SHA-256 in hexadecimal."""
        if self._num_filled_bytes:
            self._writer.submit(self._disk.bypass_cache, self._descriptor, False).result()
            self._submit_part()
        for part in self._parts:
            part.wait_until_free()
        return super().finish()

    def _submit_part(self) -> None:
        data = self._part.memory_N[: self._num_filled_bytes].data
        hashing = self._pool.submit(self._digest.update, data)
        self._part.pending += [
            hashing,
            self._writer.submit(self._disk.write, self._descriptor, data),
        ]
        self._part = next(self._next)
        self._num_filled_bytes = 0
        self._part.wait_until_free()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.shutdown(wait=True, cancel_futures=True)
        super().__exit__(kind, error, trace)
        _free_blocks.extend(part.memory_N for part in self._parts)


def create_hashed_file(path: StoragePath, disk: Disk, size_bytes: int) -> HashedFile:
    """Create a file for `size_bytes` bytes; large files bypass the page cache."""
    return (DirectFile if size_bytes >= LARGE_BYTES else HashedFile)(path, disk)
