"""Paths of checkpoints: local, or fsspec URLs (`s3://bucket/run`, `gs://`). No torch."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from shardwright.errors import CheckpointError

BLOCK_BYTES = 16 * 1024**2
"""Size of one write, read or hash update; the cost of its system call is negligible."""


class ReadableFile(ABC):
    """File open for reading; a context manager."""

    size_bytes: int

    @abstractmethod
    def read_into(self, position: int, data: memoryview) -> int:
        """Read once into `data` from byte `position`; return the byte count, 0 at the end."""

    @abstractmethod
    def close(self) -> None:
        """Close the file and release its descriptor or connection."""

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
        return str(self.file_system.unstrip_protocol(self.path))

    def __repr__(self) -> str:
        return f"RemotePath({self})"

    def read_kind(self) -> str | None:
        """Return `file`, `directory`, another kind, or None if nothing exists."""
        self.file_system.invalidate_cache()
        try:
            return str(self.file_system.info(self.path)["type"])
        except FileNotFoundError:
            return None

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
        self.file_system.invalidate_cache()
        try:
            entries = self.file_system.ls(self.path, detail=True)
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
            CheckpointError: not a regular file, or it cannot be opened.
        """
        if not self.is_file():
            raise CheckpointError(f"{self.name} is not a regular file", field=str(self.parent))
        try:
            return _RemoteFile(self)
        except OSError as error:
            raise CheckpointError(
                f"{self.name} cannot be opened: {error}", field=str(self.parent)
            ) from error


StoragePath: TypeAlias = Path | RemotePath
"""Path of a checkpoint: local, or in an fsspec file system."""


class _RemoteFile(ReadableFile):
    def __init__(self, path: RemotePath) -> None:
        self.size_bytes = int(path.file_system.size(path.path))
        self._file = path.file_system.open(path.path, "rb")

    def read_into(self, position: int, data: memoryview) -> int:
        self._file.seek(position)
        block = self._file.read(min(len(data), BLOCK_BYTES))
        data[: len(block)] = block
        return len(block)

    def close(self) -> None:
        self._file.close()


def parse_storage_path(text: str | Path | RemotePath) -> StoragePath:
    """Parse a local path or an fsspec URL.

    Raises:
        CheckpointError: the URL's file system is unknown, not installed or unreachable.

    >>> parse_storage_path("runs/demo"), parse_storage_path("memory://runs/demo") / "latest"
    (PosixPath('runs/demo'), RemotePath(memory:///runs/demo/latest))
    """
    if not isinstance(text, str) or not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        return Path(text) if isinstance(text, str) else text
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    try:
        file_system, path = fsspec.url_to_fs(text)
    except (ImportError, ValueError, OSError) as error:
        raise CheckpointError(
            f"this location cannot be used: {error}", field="checkpoint.dir", got=text
        ) from error
    is_local = isinstance(file_system, LocalFileSystem)
    return Path(path) if is_local else RemotePath(path.rstrip("/"), file_system)
