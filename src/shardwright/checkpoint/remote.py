"""How checkpoints are written to an object store. No torch.

What differs from a local folder: nothing can be renamed in one instant, so a checkpoint is written under its own name and is one
from the instant its manifest is there; and an object is durable when its upload has ended, so there is nothing to sync.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from shardwright.checkpoint.disk import LOCAL_DISK, Disk
from shardwright.checkpoint.place import BLOCK_BYTES, Place


class RemoteDisk(Disk):
    """One method per operation, as for local files; those that mean nothing here do nothing."""

    renames = False

    def __init__(self) -> None:
        self._open: dict[int, Any] = {}

    def make_folder(self, path: Any) -> None:
        """Make a folder, where folders are things."""
        path.file_system.makedirs(path.path, exist_ok=True)

    def create(self, path: Any) -> int:
        """Open an object for writing, in the place of one that is there."""
        file = path.file_system.open(path.path, "wb", block_size=BLOCK_BYTES)
        self._open[id(file)] = file
        return id(file)

    def write(self, descriptor: int, data: memoryview) -> None:
        """Write all of `data` at the end."""
        self._open[descriptor].write(bytes(data))

    def bypass_cache(self, descriptor: int, bypass: bool) -> bool:
        """There is no cache."""
        return False

    def sync(self, descriptor: int) -> None:
        """End the upload: from here on the object is there and durable, as far as the store promises it."""
        self._open[descriptor].close()

    def close(self, descriptor: int) -> None:
        """Let go of an object; one whose upload was not ended is given up where the store can do that."""
        file = self._open.pop(descriptor)
        if not file.closed:
            with contextlib.suppress(Exception):  # an error is under way already
                file.discard()
            with contextlib.suppress(Exception):
                file.close()

    def sync_folder(self, path: Any) -> None:
        """Nothing to do."""

    def rename(self, source: Any, target: Any) -> None:
        """Never called: see `renames`."""
        raise AssertionError("object stores rename nothing")

    def remove(self, path: Any) -> None:
        """Remove an object."""
        with contextlib.suppress(FileNotFoundError):
            path.file_system.rm_file(path.path)

    def remove_folder(self, path: Any) -> None:
        """Remove an empty folder, where folders are things."""
        with contextlib.suppress(OSError):
            path.file_system.rmdir(path.path)

    def remove_tree(self, path: Any) -> None:
        """Remove all objects of a folder, the manifest first: without it the rest is no checkpoint."""
        for name, size in sorted(path.sizes().items(), key=lambda item: (not item[0].startswith("manifest"), item[0])):
            if size is None:
                self.remove_tree(path / name)
            else:
                self.remove(path / name)
        self.remove_folder(path)


REMOTE_DISK = RemoteDisk()


def disk_of(place: Place) -> Disk:
    """The operations that write there."""
    return LOCAL_DISK if isinstance(place, Path) else REMOTE_DISK
