"""Everything that checkpoints change on disk goes through `Disk`, one method per system call. No torch.

The tests put another `Disk` in its place: one that kills the process before the n-th operation, one that runs out of space.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.checkpoint.place import BLOCK_BYTES, OpenFile, Place
from shardwright.errors import CheckpointError

if TYPE_CHECKING:
    from types import TracebackType


_DIRECT = getattr(os, "O_DIRECT", 0)


class Disk:
    """A local or mounted file system; a subclass (`RemoteDisk`) takes other paths."""

    renames = True
    """Whether a folder gets its name in one instant; where not, a checkpoint is one as soon as it has a manifest."""

    def make_folder(self, path: Any) -> None:
        """Make a folder that must not be there."""
        path.mkdir(mode=0o755)

    def create(self, path: Any) -> int:
        """Open a new file for writing; it must not be there, not even as a link."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)

    def write(self, descriptor: int, data: memoryview) -> None:
        """Write all of `data` at the end."""
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self.bypass_cache(descriptor, False):
                    raise  # else: the device wants other sizes than ours, so the rest goes through the cache

    def bypass_cache(self, descriptor: int, bypass: bool) -> bool:
        """Write past the page cache from here on, or through it again; whether anything has changed.

        A hint: some file systems cannot, and some systems have no such thing.
        """
        if not _DIRECT:
            return False
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        if bool(flags & _DIRECT) == bypass:
            return False
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags ^ _DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True

    def sync(self, descriptor: int) -> None:
        """Bring a file's bytes to the device."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a file."""
        os.close(descriptor)

    def sync_folder(self, path: Any) -> None:
        """Bring a folder's names to the device."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems know no fsync of folders; their renames are synchronous
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: Any, target: Any) -> None:
        """Move within a file system; a file in the target's place is replaced in the same instant."""
        os.replace(source, target)

    def remove(self, path: Any) -> None:
        """Remove a file or link."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Any) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def remove_tree(self, path: Any) -> None:
        """Remove a folder and what is in it; links inside are removed, not followed."""
        with os.scandir(path) as entries:
            inside = sorted(entries, key=lambda entry: entry.name)
        for entry in inside:
            if entry.is_dir(follow_symlinks=False):
                self.remove_tree(Path(entry.path))
            else:
                self.remove(Path(entry.path))
        self.remove_folder(path)


LOCAL_DISK = Disk()


class HashedFile:
    """A new file whose SHA-256 is taken from the very bytes handed to `write`, on a second thread, never read back.

    `write` returns before the block is hashed: the caller leaves the bytes alone until the next call has returned.
    """

    def __init__(self, path: Place, disk: Disk) -> None:
        self.path = path
        self.size_bytes = 0
        self._disk = disk
        self._digest = hashlib.sha256()
        self._hashing: Future[None] | None = None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-hash")
        self._descriptor = disk.create(path)

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        if self._hashing is not None:
            self._hashing.result()
        self._hashing = self._pool.submit(self._digest.update, data)
        self._disk.write(self._descriptor, data)
        self.size_bytes += len(data)

    def finish(self) -> str:
        """Bring everything to the device; returns the SHA-256 in hexadecimal."""
        self._disk.sync(self._descriptor)
        if self._hashing is not None:
            self._hashing.result()
        return self._digest.hexdigest()

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=True)
        self._disk.close(self._descriptor)


def write_file(path: Place, data: bytes, disk: Disk) -> str:
    """Write a small new file and bring it to the device; returns its SHA-256."""
    with HashedFile(path, disk) as file:
        file.write(memoryview(data))
        return file.finish()


class _LocalFile(OpenFile):
    def __init__(self, descriptor: int) -> None:
        self.size_bytes = os.fstat(descriptor).st_size
        self.descriptor = descriptor

    def read_into(self, position: int, data: memoryview) -> int:
        return os.preadv(self.descriptor, [data[:BLOCK_BYTES]], position)

    def close(self) -> None:
        os.close(self.descriptor)


def open_regular(path: Place) -> OpenFile:
    """Open for reading, refusing links, pipes and devices, which could lead outside, hang, or never end.

    Raises:
        CheckpointError: it is not a regular file, or cannot be opened.
    """
    if not isinstance(path, Path):
        return path.open_file()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = "is a symbolic link" if error.errno == errno.ELOOP else f"cannot be opened: {error.strerror}"
        raise CheckpointError(f"{path.name} {reason}", field=str(path.parent)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path.name} is not a regular file", field=str(path.parent))
    with contextlib.suppress(OSError, AttributeError):  # a hint; not every system has it
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return _LocalFile(descriptor)


def sizes_in(folder: Place) -> dict[str, int | None]:
    """Names in a folder with sizes in bytes, None for links and what else is no regular file; nothing is opened."""
    if not isinstance(folder, Path):
        return folder.sizes()
    with os.scandir(folder) as entries:
        return {
            entry.name: entry.stat(follow_symlinks=False).st_size if entry.is_file(follow_symlinks=False) else None
            for entry in entries
        }


def read_small(path: Place, limit_bytes: int) -> bytes:
    """All of a regular file that must not be larger than `limit_bytes`.

    Raises:
        CheckpointError: it is larger, a link, or cannot be read.
    """
    with open_regular(path) as file:
        if file.size_bytes > limit_bytes:
            allowed = f"{limit_bytes} bytes"
            raise CheckpointError(f"{path.name} is too large", field=str(path.parent), got=file.size_bytes, allowed=allowed)
        try:
            return file.read(0, file.size_bytes)
        except OSError as error:
            raise CheckpointError(f"{path.name} cannot be read: {error}", field=str(path.parent)) from error


def hash_file(path: Place, *, on_block: Callable[[int], None] | None = None) -> tuple[int, str]:
    """Bytes and SHA-256 of a regular file, told block by block to `on_block`.

    Raises:
        CheckpointError: it is a link or not a regular file, or cannot be read.
    """
    digest = hashlib.sha256()
    size, block = 0, memoryview(bytearray(BLOCK_BYTES))
    with open_regular(path) as file:
        try:
            while count := file.read_into(size, block):
                digest.update(block[:count])
                size += count
                if on_block is not None:
                    on_block(count)
        except OSError as error:
            raise CheckpointError(f"{path.name} cannot be read: {error}", field=str(path.parent)) from error
    return size, digest.hexdigest()
