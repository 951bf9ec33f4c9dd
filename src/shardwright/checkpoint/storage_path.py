"""Paths of checkpoints: local, or fsspec URLs (`s3://bucket/run`, `gs://`). No torch."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from shardwright.errors import CheckpointError
from shardwright.masking import mask_secrets
from shardwright.store_requests import open_file_system, read_range, send_request

BLOCK_BYTES = 16 * 1024**2
"""Size of one write, read or hash update; the cost of its system call is negligible."""
REQUEST_BYTES = 8 * 1024**2
"""Largest range of an object that is fetched by one request; hashing begins with the first one."""
NUM_PARALLEL_READS = 8
"""Ranges of objects that are fetched at the same time; each takes host memory."""
SHORT_RUN_BYTES = 64 * 1024
"""Shorter runs are read with the bytes between them, which takes less time than another read. An
object store sends as many bytes in less than a millisecond; a request takes several."""


class ReadableFile(ABC):
    """File open for reading; a context manager."""

    size_bytes: int
    request_bytes: int | None = None
    """Largest read, if each is a request to a store, so that neighbours are read together."""

    @abstractmethod
    def read_into(self, position: int, data: memoryview) -> int:
        """Read once into `data` from byte `position`; return the byte count, 0 at the end."""

    @abstractmethod
    def close(self) -> None:
        """Close the file and release its descriptor or connection."""

    def iterate_blocks(self) -> Iterator[bytes | memoryview]:
        """Yield all bytes in order; the memory of a block may be used again by the next."""
        block = memoryview(bytearray(max(1, min(BLOCK_BYTES, self.size_bytes))))
        position = 0
        while count := self.read_into(position, block):
            yield block[:count]
            position += count

    def read(self, position: int, num_bytes: int) -> bytes:
        """Read `num_bytes` from byte `position`, fewer at the end of the file."""
        data = memoryview(bytearray(num_bytes))
        filled = 0
        while filled < num_bytes and (count := self.read_into(position + filled, data[filled:])):
            filled += count
        return bytes(data[:filled])

    def __enter__(self) -> ReadableFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, order=True, repr=False)
class RemotePath:
    """Path in an fsspec file system, with the methods of `pathlib.Path` that checkpoints use.

    It has no links; an entry that is neither a regular file nor a folder counts as neither. Only a
    missing entry counts as absent: a store that refuses or does not answer raises its own error.
    """

    path: str
    file_system: Any

    @property
    def name(self) -> str:
        """Last component of the path."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """Folder that contains this path."""
        return RemotePath(self.path.rpartition("/")[0], self.file_system)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.path}/{name}", self.file_system)

    def __str__(self) -> str:
        return mask_secrets(str(self.file_system.unstrip_protocol(self.path)))

    def __repr__(self) -> str:
        return f"RemotePath({self})"

    def read_info(self) -> dict[str, Any] | None:
        """Return `type`, `size` and other details of the object here; None if there is none.

        Raises:
            OSError: the store refuses, or does not answer.
        """

        def request() -> dict[str, Any]:
            self.file_system.invalidate_cache()
            return dict(self.file_system.info(self.path))

        try:
            return send_request(f"looking for {self}", request)
        except FileNotFoundError:
            return None

    def read_kind(self) -> str | None:
        """Return `file`, `directory`, another kind, or None if nothing exists."""
        info = self.read_info()
        return None if info is None else str(info["type"])

    def read_size(self) -> int | None:
        """Return the size of a regular file in bytes, None for anything else."""
        info = self.read_info()
        return int(info["size"] or 0) if info is not None and info["type"] == "file" else None

    def is_file(self) -> bool:
        """Return True for a regular file."""
        return self.read_kind() == "file"

    def is_dir(self) -> bool:
        """Return True for a folder."""
        return self.read_kind() == "directory"

    def exists(self) -> bool:
        """Return True if a file or folder has this path."""
        return self.read_kind() is not None

    def is_symlink(self) -> bool:
        """Return False: these file systems have no links."""
        return False

    def list_sizes(self) -> dict[str, int | None]:
        """Return sizes in bytes by name, None for entries that are not regular files."""

        def request() -> list[dict[str, Any]]:
            self.file_system.invalidate_cache()
            return list(self.file_system.ls(self.path, detail=True))

        try:
            entries = send_request(f"listing {self}", request)
        except FileNotFoundError:
            return {}
        entries_by_name = {
            entry["name"].rstrip("/").rpartition("/")[2]: entry
            for entry in entries
            if entry["name"].strip("/")
        }
        return {
            name: int(entry["size"] or 0) if entry["type"] == "file" else None
            for name, entry in entries_by_name.items()
        }

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the paths in the folder."""
        return (self / name for name in self.list_sizes())

    def open_file(self) -> ReadableFile:
        """Open the file for reading.

        Raises:
            CheckpointError: not a regular file.
            OSError: the store refuses, or does not answer.
        """
        size = self.read_size()
        if size is None:
            raise CheckpointError(f"{self.name} is not a regular file", field=str(self.parent))
        return _RemoteFile(self, size)


StoragePath: TypeAlias = Path | RemotePath
"""Path of a checkpoint: local, or in an fsspec file system."""


class _RemoteFile(ReadableFile):
    """Object that is read by byte ranges: a request for each block."""

    request_bytes = REQUEST_BYTES

    def __init__(self, path: RemotePath, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._path = path

    def read_into(self, position: int, data: memoryview) -> int:
        end = min(position + min(len(data), REQUEST_BYTES), self.size_bytes)
        block = self._fetch(position, end) if end > position else b""
        data[: len(block)] = block
        return len(block)

    def iterate_blocks(self) -> Iterator[bytes | memoryview]:
        """Yield all bytes in order; the next blocks are on their way meanwhile."""
        starts = iter(range(0, self.size_bytes, REQUEST_BYTES))
        pool = ThreadPoolExecutor(NUM_PARALLEL_READS, "checkpoint-download")
        try:
            pending = deque(
                pool.submit(self._fetch, start, min(start + REQUEST_BYTES, self.size_bytes))
                for start in islice(starts, NUM_PARALLEL_READS)
            )
            while pending:
                block = pending.popleft().result()
                if (start := next(starts, None)) is not None:
                    end = min(start + REQUEST_BYTES, self.size_bytes)
                    pending.append(pool.submit(self._fetch, start, end))
                yield block
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, start: int, end: int) -> bytes:
        return read_range(self._path.file_system, self._path.path, start, end, self._path)

    def close(self) -> None:
        """Do nothing: each request has its own connection."""


class CachedFile(ReadableFile):
    """File whose bytes are in host memory."""

    def __init__(self, blocks: Sequence[bytes]) -> None:
        """
        Args:
            blocks: All bytes, in blocks of `REQUEST_BYTES` of which only the last may be shorter.
        """
        self.size_bytes = sum(map(len, blocks))
        self._blocks = blocks

    def read_into(self, position: int, data: memoryview) -> int:
        index, offset = divmod(position, REQUEST_BYTES)
        if index >= len(self._blocks):
            return 0
        block = memoryview(self._blocks[index])[offset : offset + len(data)]
        data[: len(block)] = block
        return len(block)

    def close(self) -> None:
        """Do nothing: the memory belongs to the owner of the blocks."""


def parse_storage_path(
    text: str | Path | RemotePath, *, field: str = "checkpoint.dir"
) -> StoragePath:
    """Parse a local path or an fsspec URL.

    Args:
        field: name of the setting or argument, for errors.

    Raises:
        CheckpointError: the URL's file system is unknown, not installed or unreachable.

    >>> parse_storage_path("runs/demo"), parse_storage_path("memory://runs/demo") / "latest"
    (PosixPath('runs/demo'), RemotePath(memory:///runs/demo/latest))
    """
    if not isinstance(text, str) or not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        return Path(text) if isinstance(text, str) else text
    from fsspec.implementations.local import LocalFileSystem

    try:
        file_system, path = open_file_system(text)
    except (ImportError, ValueError, OSError) as error:
        raise CheckpointError(
            f"this location cannot be used: {error}", field=field, got=text
        ) from error
    is_local = isinstance(file_system, LocalFileSystem)
    return Path(path) if is_local else RemotePath(path.rstrip("/"), file_system)
