"""Writing of checkpoints to object stores. No torch.

Unlike a local folder, an object store cannot rename atomically, so a checkpoint is written
under its final name and exists as soon as its manifest does. An object is durable once its
upload has finished, so nothing needs a sync. Requests are retried: see `store_requests`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from shardwright.checkpoint.disk import LOCAL_DISK, Disk
from shardwright.checkpoint.object_upload import ObjectUpload
from shardwright.checkpoint.storage_path import StoragePath
from shardwright.store_requests import has_buckets, raise_converted, send_request


class ObjectStoreDisk(Disk):
    """`Disk` for object stores; operations without a counterpart do nothing."""

    has_atomic_rename = False

    def __init__(self) -> None:
        self._uploads: dict[int, ObjectUpload] = {}

    def make_folder(self, path: Any) -> None:
        """Create a folder if the store has folders; never a bucket."""
        if not has_buckets(path.file_system):
            send_request(
                f"creating {path}", lambda: path.file_system.makedirs(path.path, exist_ok=True)
            )

    def create(self, path: Any) -> int:
        """Open an object for writing; it replaces an existing one."""
        upload = ObjectUpload(path)
        self._uploads[id(upload)] = upload
        return id(upload)

    def write(self, descriptor: int, data: memoryview) -> None:
        """Write all of `data` at the end."""
        self._uploads[descriptor].write(data)

    def bypass_cache(self, descriptor: int, should_bypass: bool) -> bool:
        """Return False: there is no page cache."""
        return False

    def sync(self, descriptor: int) -> None:
        """Finish the upload: the object exists and is as durable as the store guarantees."""
        self._uploads[descriptor].finish()

    def close(self, descriptor: int) -> None:
        """Release an object; an unfinished upload is discarded."""
        self._uploads.pop(descriptor).discard()

    def sync_folder(self, path: Any) -> None:
        """Do nothing: stores need no sync of folders."""

    def rename(self, source: Any, target: Any) -> None:
        """Raise: never called, because `has_atomic_rename` is False."""
        raise AssertionError("object stores cannot rename")

    def remove(self, path: Any) -> None:
        """Remove an object if it exists."""
        with contextlib.suppress(FileNotFoundError):
            send_request(f"removing {path}", lambda: path.file_system.rm_file(path.path))

    def remove_folder(self, path: Any) -> None:
        """Remove an empty folder if the store has folders."""
        if not has_buckets(path.file_system):
            with contextlib.suppress(OSError), raise_converted():
                path.file_system.rmdir(path.path)

    def remove_tree(self, path: Any) -> None:
        """Remove all objects of a folder, the manifest first, which ends the checkpoint."""
        for name, size in sorted(
            path.list_sizes().items(),
            key=lambda item: (not item[0].startswith("manifest"), item[0]),
        ):
            if size is None:
                self.remove_tree(path / name)
            else:
                self.remove(path / name)
        self.remove_folder(path)


OBJECT_STORE_DISK = ObjectStoreDisk()


def get_disk(path: StoragePath) -> Disk:
    """Return the `Disk` that writes to a path."""
    return LOCAL_DISK if isinstance(path, Path) else OBJECT_STORE_DISK
