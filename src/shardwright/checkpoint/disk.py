"""File operations of checkpoints; all changes on disk use `Disk`. No torch.

Tests replace `Disk` by one that kills the process before the n-th operation, or one that runs
out of space.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright.checkpoint.storage_path import BLOCK_BYTES, ReadableFile, StoragePath
from shardwright.errors import CheckpointError

if TYPE_CHECKING:
    from types import TracebackType


_O_DIRECT = getattr(os, "O_DIRECT", 0)


class Disk:
    """File operations, one method per system call, on a local or mounted file system.

    The subclass `ObjectStoreDisk` is for object stores.
    """

    has_atomic_rename = True
    """True if folders can be renamed atomically; if not, the manifest makes a checkpoint."""

    def make_folder(self, path: Any) -> None:
        """Create a folder that must not exist."""
        path.mkdir(mode=0o755)

    def create(self, path: Any) -> int:
        """Create a file for writing; it must not exist, not even as a link."""
        return os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
        )

    def write(self, descriptor: int, data: memoryview) -> None:
        """Write all of `data` at the end."""
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self.bypass_cache(descriptor, False):
                    raise
                # O_DIRECT rejected the size or alignment: the rest goes through the cache

    def bypass_cache(self, descriptor: int, should_bypass: bool) -> bool:
        """Turn O_DIRECT on or off for a file; return True if that changed anything.

        No effect where the file system or the operating system does not support it.
        """
        if not _O_DIRECT:
            return False
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        if bool(flags & _O_DIRECT) == should_bypass:
            return False
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags ^ _O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True

    def create_scratch(self, folder: Path) -> int:
        """Create an unnamed file for reading and writing; it disappears after a crash."""
        try:
            return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
        # The file system knows no files without a name: remove the name at once.
        descriptor, name = tempfile.mkstemp(prefix="shardwright-scratch-", dir=folder)
        os.unlink(name)
        return descriptor

    def reserve(self, descriptor: int, num_bytes: int, position: int = 0) -> None:
        """Allocate blocks of a file, so that later writes find space; new ones read as zeros."""
        os.posix_fallocate(descriptor, position, num_bytes)

    def read_at(self, descriptor: int, data: memoryview, position: int) -> None:
        """Fill `data` from byte `position`."""
        if self.read_until_end(descriptor, data, position) < len(data):
            raise OSError(errno.EIO, "the file ended early")

    def read_until_end(self, descriptor: int, data: memoryview, position: int) -> int:
        """Fill `data` from byte `position` up to the end of the file; return the bytes read."""
        first = position
        while data:
            count = self._move(os.preadv, descriptor, data, position)
            data, position = data[count:], position + count
            # After the last bytes of a file the position may be one that O_DIRECT rejects.
            if not count or (data and position >= os.fstat(descriptor).st_size):
                break
        return position - first

    def write_at(self, descriptor: int, data: memoryview, position: int) -> None:
        """Write all of `data` at byte `position`."""
        while data:
            count = self._move(os.pwritev, descriptor, data, position)
            data, position = data[count:], position + count

    def _move(
        self,
        operation: Callable[[int, list[memoryview], int], int],
        descriptor: int,
        data: memoryview,
        position: int,
    ) -> int:
        """Read or write once; if direct I/O rejects size or alignment, through the page cache.

        Of several threads that it rejects, the first turns it off and all repeat their request.
        """
        try:
            return operation(descriptor, [data], position)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        self.bypass_cache(descriptor, False)
        return operation(descriptor, [data], position)

    def sync(self, descriptor: int) -> None:
        """Flush the bytes of a file to the device."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close the file of a descriptor."""
        os.close(descriptor)

    def sync_folder(self, path: Any) -> None:
        """Flush the directory entries of a folder to the device."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems cannot fsync folders; their renames are synchronous.
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: Any, target: Any) -> None:
        """Move within a file system, replacing an existing target file atomically."""
        os.replace(source, target)

    def remove(self, path: Any) -> None:
        """Remove a file or link."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Any) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def remove_tree(self, path: Any) -> None:
        """Remove a folder and its contents; links inside are removed, not followed."""
        with os.scandir(path) as entries:
            children = sorted(entries, key=lambda entry: entry.name)
        for entry in children:
            if entry.is_dir(follow_symlinks=False):
                self.remove_tree(Path(entry.path))
            else:
                self.remove(Path(entry.path))
        self.remove_folder(path)


LOCAL_DISK = Disk()


class HashedFile:
    """New file that hashes the bytes passed to `write` on a second thread.

    `write` returns before the block is hashed: the caller must not change the bytes until the
    next call has returned.
    """

    def __init__(self, path: StoragePath, disk: Disk) -> None:
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
        """Sync the file to the device and return its SHA-256 in hexadecimal."""
        self._disk.sync(self._descriptor)
        if self._hashing is not None:
            self._hashing.result()
        return self._digest.hexdigest()

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True)
        self._disk.close(self._descriptor)


def write_file(path: StoragePath, data: bytes, disk: Disk) -> str:
    """Write a small new file, sync it to the device and return its SHA-256."""
    with HashedFile(path, disk) as file:
        file.write(memoryview(data))
        return file.finish()


class _LocalFile(ReadableFile):
    def __init__(self, descriptor: int) -> None:
        self.size_bytes = os.fstat(descriptor).st_size
        self.descriptor = descriptor

    def read_into(self, position: int, data: memoryview) -> int:
        return os.preadv(self.descriptor, [data[:BLOCK_BYTES]], position)

    def close(self) -> None:
        os.close(self.descriptor)


def open_regular_file(path: StoragePath) -> ReadableFile:
    """Open a regular file for reading.

    Links, pipes and devices could lead outside, block or never end.

    Raises:
        CheckpointError: not a regular file, or it cannot be opened.
    """
    if not isinstance(path, Path):
        return path.open_file()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = (
            "is a symbolic link"
            if error.errno == errno.ELOOP
            else f"cannot be opened: {error.strerror}"
        )
        raise CheckpointError(f"{path.name} {reason}", field=str(path.parent)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path.name} is not a regular file", field=str(path.parent))
    with contextlib.suppress(OSError, AttributeError):  # only a hint, not available everywhere
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return _LocalFile(descriptor)


@contextlib.contextmanager
def convert_read_errors(path: StoragePath) -> Iterator[None]:
    """Raise failures to read a file as CheckpointError.

    A store that does not answer proves no damage, so of its errors only a missing object counts.
    """
    try:
        yield
    except OSError as error:
        if not isinstance(path, Path) and not isinstance(error, FileNotFoundError):
            raise
        raise CheckpointError(
            f"{path.name} cannot be read: {error}", field=str(path.parent)
        ) from error


def list_sizes(folder: StoragePath) -> dict[str, int | None]:
    """Return sizes in bytes by name, None for entries that are not regular files."""
    if not isinstance(folder, Path):
        return folder.list_sizes()
    with os.scandir(folder) as entries:
        return {
            entry.name: entry.stat(follow_symlinks=False).st_size
            if entry.is_file(follow_symlinks=False)
            else None
            for entry in entries
        }


def read_small_file(path: StoragePath, limit_bytes: int, file: ReadableFile | None = None) -> bytes:
    """Read a regular file of at most `limit_bytes`.

    Args:
        file: the open file; by default it is opened.

    Raises:
        CheckpointError: the file is larger, a link, or cannot be read.
    """
    with file or open_regular_file(path) as file:
        if file.size_bytes > limit_bytes:
            allowed = f"{limit_bytes} bytes"
            raise CheckpointError(
                f"{path.name} is too large",
                field=str(path.parent),
                got=file.size_bytes,
                allowed=allowed,
            )
        with convert_read_errors(path):
            content = file.read(0, file.size_bytes)
    return content


def hash_file(
    path: StoragePath,
    *,
    on_block: Callable[[int], None] | None = None,
    cached_blocks: list[bytes] | None = None,
) -> tuple[int, str]:
    """Return size in bytes and SHA-256 of a regular file.

    Args:
        on_block: Receives the bytes of each block.
        cached_blocks: Receives the blocks of an object, not of a local file; see `CachedFile`.

    Raises:
        CheckpointError: a link, not a regular file, or it cannot be read.
    """
    digest = hashlib.sha256()
    size = 0
    with open_regular_file(path) as file, convert_read_errors(path):
        for block in file.iterate_blocks():
            digest.update(block)
            size += len(block)
            if cached_blocks is not None and isinstance(block, bytes):
                cached_blocks.append(block)
            if on_block is not None:
                on_block(len(block))
    return size, digest.hexdigest()
