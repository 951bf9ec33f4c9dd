"""Cache of tokenised shards on disk, bounded in bytes and shared by ranks and runs.

shards/<key>/               a complete shard
shards/<key>.<id>.partial/  a shard that is being built
locks/<key>                 locked shared by readers of a shard, exclusively by its builder
reservations/<id>           bytes promised to a builder, which keeps the file locked
lock                        locked while bytes are counted, reserved or freed

All locks are flocks, so the kernel releases those of a process that is killed; what it left behind
is then removed by the next process that needs the space. A shard that is locked is never removed.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwright.errors import DataError

POLL_SECONDS = 0.05
WARNING_SECONDS = 30.0
"""Wait for space after which a warning is logged."""
_RESERVATION_STEP = 64
"""If there is space, a reservation grows by this part of the limit, so that it grows rarely."""

logger = logging.getLogger(__name__)


class CacheFull(Exception):
    """Raised within a build if readers and other builders occupy the space; it is tried again."""


class ShardLease:
    """Complete shard that no process removes until the lease is released."""

    def __init__(self, folder: Path, handle: int) -> None:
        self.folder = folder
        self._handle: int | None = handle

    def release(self) -> None:
        """Allow the shard's removal. Open memory maps of it would keep its space in use."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class Reservation:
    """Bytes of the cache that belong to one build."""

    def __init__(self, cache: ShardCache, path: Path) -> None:
        self._cache = cache
        self._path = path
        self.num_bytes = 0

    def grow_to(self, num_bytes: int) -> None:
        """Reserve at least `num_bytes` in total; shards that no process reads are removed for it.

        Raises:
            CacheFull: shards in use and other builds leave too little space.
            DataError: more bytes than the whole cache may have.
        """
        if num_bytes > self.num_bytes:
            self._cache.reserve(self, num_bytes)

    def write(self, num_bytes: int) -> None:
        """Record the number of reserved bytes, for the other processes."""
        self._path.write_text(str(num_bytes))
        self.num_bytes = num_bytes


BuildShard = Callable[[Path, Reservation], None]
"""Function that fills a folder, and reserves bytes before it writes them."""


class ShardCache:
    """Shards by key, of at most `max_bytes` together with those being built.

    Raises:
        DataError: the folder cannot be created.
    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        self.root = root
        self.max_bytes = max_bytes
        self._shards = root / "shards"
        self._locks = root / "locks"
        self._reservations = root / "reservations"
        try:
            for folder in (self._shards, self._locks, self._reservations):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"the cache of tokenised shards cannot be created: {error.strerror}",
                field="data.cache_dir",
                got=str(root),
                remedy="Set another folder",
            ) from error

    def find(self, key: str) -> ShardLease | None:
        """Return a lease of a shard, or None if it is absent or being built or removed."""
        handle = self._open_lock(key)
        folder = self._shards / key
        if _lock(handle, fcntl.LOCK_SH) and folder.is_dir():
            os.utime(folder)  # used last
            return ShardLease(folder, handle)
        os.close(handle)
        return None

    def find_or_build(
        self, key: str, num_bytes: int, build: BuildShard, release_shards: Callable[[], None]
    ) -> ShardLease:
        """Return a lease of a shard; build it if it is absent, or wait for its builder.

        Args:
            num_bytes: bytes to reserve before the build starts.
            release_shards: releases the caller's leases. It is called if there is no space, so
                that processes that share the cache never wait for each other.

        Raises:
            DataError: the shard is larger than the cache, or the cache cannot be written.
                Exceptions of `build` propagate.
        """
        start_seconds = time.monotonic()
        has_warned = False
        while True:
            if lease := self.find(key):
                return lease
            is_full = False
            try:
                if lease := self._try_build(key, num_bytes, build):
                    return lease
            except CacheFull:
                is_full = True
                release_shards()
            if is_full and not has_warned and time.monotonic() - start_seconds > WARNING_SECONDS:
                has_warned = True
                logger.warning(
                    "waiting for space in %s: the runs that share it need more than "
                    "data.streaming.cache_bytes: %d",
                    self.root,
                    self.max_bytes,
                )
            time.sleep(POLL_SECONDS * random.uniform(1, 4 if is_full else 1.5))

    def build_ahead(self, key: str, num_bytes: int, build: BuildShard) -> bool:
        """Build a shard unless it exists or a process builds it; return False if space is missing.

        Raises:
            As `find_or_build`.
        """
        if lease := self.find(key):
            lease.release()
            return True
        try:
            if lease := self._try_build(key, num_bytes, build):
                lease.release()
        except CacheFull:
            return False
        return True

    @contextmanager
    def open_scratch(self, num_bytes: int) -> Iterator[Path]:
        """Yield an empty folder for `num_bytes` of files, removed afterwards; wait for space.

        Raises:
            DataError: the folder would be larger than the cache.
        """
        key = f"scratch-{secrets.token_hex(8)}"
        handle = self._open_lock(key)
        folder = self._shards / f"{key}.0.partial"
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            with self._open_reservation() as reservation:
                while True:
                    with suppress(CacheFull):
                        reservation.grow_to(num_bytes)
                        break
                    time.sleep(POLL_SECONDS)
                folder.mkdir()
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            (self._locks / key).unlink(missing_ok=True)
            os.close(handle)

    def count_bytes(self) -> int:
        """Return the bytes of all shards, and those reserved for shards being built."""
        with self._locked():
            return sum(size for _, _, size in self._list_shards()) + self._count_reserved(None)

    def reserve(self, reservation: Reservation, num_bytes: int) -> None:
        """Let a reservation grow; see `Reservation.grow_to`."""
        if num_bytes > self.max_bytes:
            raise DataError(
                "a shard does not fit into the cache",
                field="data.streaming.cache_bytes",
                got=f"{self.max_bytes:,} bytes",
                allowed=f"at least {num_bytes:,} bytes, for one source file while it is tokenised",
                remedy="Raise the limit, or split the source into smaller files",
            )
        wanted = max(num_bytes, reservation.num_bytes + self.max_bytes // _RESERVATION_STEP)
        with self._locked():
            reserved = self._count_reserved(reservation)
            shards = self._list_shards()
            used = reserved + sum(size for _, _, size in shards)
            for _, folder, size in sorted(shards):
                if used + num_bytes <= self.max_bytes:
                    break
                if self._remove(folder):
                    used -= size
            available = self.max_bytes - used
            if available < num_bytes:
                raise CacheFull
            reservation.write(min(wanted, available))

    def _try_build(self, key: str, num_bytes: int, build: BuildShard) -> ShardLease | None:
        """Build a shard, unless another process builds it or reads it: then return None."""
        handle = self._open_lock(key)
        folder = self._shards / key
        try:
            if not _lock(handle, fcntl.LOCK_EX):
                os.close(handle)
                return None
            if not folder.is_dir():
                self._build(folder, num_bytes, build)
        except OSError as error:
            os.close(handle)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
                raise DataError(
                    f"the cache of tokenised shards cannot be written: {error.strerror}",
                    field="data.cache_dir",
                    got=str(error.filename or folder),
                    remedy="Free some space there, choose another folder, or reduce "
                    "data.streaming.cache_bytes",
                ) from error
            raise
        except BaseException:
            os.close(handle)
            raise
        fcntl.flock(handle, fcntl.LOCK_SH)  # the change of lock may let another process remove it
        if folder.is_dir():
            return ShardLease(folder, handle)
        os.close(handle)
        return None

    def _build(self, folder: Path, num_bytes: int, build: BuildShard) -> None:
        for left_over in self._shards.glob(f"{folder.name}.*.partial"):
            shutil.rmtree(left_over, ignore_errors=True)  # of a builder that was killed
        partial = self._shards / f"{folder.name}.{secrets.token_hex(4)}.partial"
        with self._open_reservation() as reservation:
            reservation.grow_to(num_bytes)
            try:
                partial.mkdir()
                build(partial, reservation)
                reservation.grow_to(_count_bytes(partial))
                with self._locked():
                    partial.rename(folder)
                    reservation.write(0)
            finally:
                shutil.rmtree(partial, ignore_errors=True)

    @contextmanager
    def _open_reservation(self) -> Iterator[Reservation]:
        path = self._reservations / secrets.token_hex(8)
        with self._locked():
            handle = os.open(path, os.O_CREAT | os.O_RDWR)
            fcntl.flock(handle, fcntl.LOCK_EX)
            os.write(handle, b"0")
        try:
            yield Reservation(self, path)
        finally:
            path.unlink(missing_ok=True)
            os.close(handle)

    def _count_reserved(self, excluded: Reservation | None) -> int:
        """Return the bytes of all other reservations; remove those of dead processes."""
        total = 0
        for path in self._reservations.iterdir():
            if excluded is not None and path == excluded._path:
                continue
            try:
                handle = os.open(path, os.O_RDWR)
            except FileNotFoundError:
                continue  # released
            try:
                if _lock(handle, fcntl.LOCK_EX):
                    path.unlink(missing_ok=True)
                    continue
                total += int(os.read(handle, 32) or b"0")
            finally:
                os.close(handle)
        return total

    def _list_shards(self) -> list[tuple[float, Path, int]]:
        """Return time of last use, folder and bytes of every shard; remove dead partial ones."""
        shards = []
        for folder in self._shards.iterdir():
            if folder.name.endswith(".partial"):
                handle = self._open_lock(folder.name.partition(".")[0])
                if _lock(handle, fcntl.LOCK_EX):
                    shutil.rmtree(folder, ignore_errors=True)
                os.close(handle)
                continue
            with suppress(FileNotFoundError):
                shards.append((folder.stat().st_mtime, folder, _count_bytes(folder)))
        return shards

    def _remove(self, folder: Path) -> bool:
        """Remove a shard unless a process reads it; return False if one does."""
        handle = self._open_lock(folder.name)
        try:
            if not _lock(handle, fcntl.LOCK_EX):
                return False
            # Renamed first, so that no process ever sees a part of it.
            removed = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.partial")
            folder.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)
            return True
        finally:
            os.close(handle)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(self.root / "lock", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _open_lock(self, key: str) -> int:
        return os.open(self._locks / key, os.O_CREAT | os.O_RDWR)


def _lock(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _count_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
