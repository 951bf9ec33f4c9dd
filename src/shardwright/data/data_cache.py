"""Cache of prepared data: folders named by a hash of their inputs, each built once.

A folder of the cache is complete or absent: it is built under a temporary name and renamed.
Ranks and runs that need the same folder compete for a lock; one builds it, the others wait. The
lock only saves work: if two processes acquire it (both take over a stale lock), both build the
same folder and the first rename wins.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwright.data.sources.source_reader import SourceFile
from shardwright.errors import DataError
from shardwright.files import find_user_cache, open_regular_file, read_text

HEARTBEAT_SECONDS = 2.0
STALE_SECONDS = 30.0
"""Age after which a lock of another machine or container is stale. In this one its process is
looked up."""
_SETTLED_SECONDS = 2.0
_BLOCK_BYTES = 1 << 20

logger = logging.getLogger(__name__)


def find_cache_root(cache_dir: str | None) -> Path:
    """Return `cache_dir`, else $SHARDWRIGHT_CACHE/data, else ~/.cache/shardwright/data.

    Raises:
        DataError: $SHARDWRIGHT_CACHE is a URL.
    """
    if cache_dir is not None:
        return Path(cache_dir)
    base = os.environ.get("SHARDWRIGHT_CACHE")
    if base and "://" in base:
        raise DataError(
            "the cache needs a local or mounted folder, not a URL",
            field="SHARDWRIGHT_CACHE",
            got=base,
            allowed="a folder",
        )
    return (Path(base) if base else find_user_cache()) / "data"


def compute_key(value: Any) -> str:
    """Return a hash of a JSON value, used as a folder name."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def build_once(
    root: Path, name: str, build: Callable[[Path], None], *, poll_seconds: float = 0.1
) -> Path:
    """Return the folder `root/name`; call `build` to fill it if it does not exist.

    Safe for concurrent processes, also on several machines that share a file system.

    Raises:
        DataError: the cache cannot be written, for example on a full disk; partial files are
            removed. Exceptions of `build` propagate.
    """
    folder = root / name
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _FolderLock(folder.with_name(folder.name + ".lock"), poll_seconds) as lock:
            if lock.wait_for(folder):
                _fill_folder(folder, build, lock.identity)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise DataError(
            f"the cache of tokenised data cannot be written: {error.strerror or error}",
            field="data.cache_dir",
            got=str(error.filename or folder),
            remedy=f"{'Free space there, or set' if is_full else 'Set'} another folder "
            "(or SHARDWRIGHT_CACHE)",
        ) from error
    return folder


def _fill_folder(folder: Path, build: Callable[[Path], None], identity: str) -> None:
    partial = _build_partial_path(folder, identity)
    partial.mkdir()
    try:
        build(partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _build_partial_path(folder: Path, identity: str) -> Path:
    """Return the temporary path of a lock's owner, named by the last word of its identity."""
    return folder.with_name(f"{folder.name}.{identity.rpartition(' ')[2]}.partial")


class _FolderLock:
    """Lock file with the identity of the builder; a heartbeat thread updates its mtime."""

    def __init__(self, path: Path, poll_seconds: float) -> None:
        self._path = path
        self._poll_seconds = poll_seconds
        self.identity = f"{identify_machine()} {os.getpid()} {secrets.token_hex(4)}"
        self._is_acquired = False
        self._stop = threading.Event()
        self._heartbeat_thread = threading.Thread(target=self._run_heartbeat, daemon=True)

    def __enter__(self) -> _FolderLock:
        return self

    def wait_for(self, folder: Path) -> bool:
        """Return True once the lock is acquired, False once another process built `folder`."""
        has_logged = False
        last_state = None
        last_change = time.monotonic()
        while not self._acquire():
            if folder.is_dir():
                return False
            state = self._read_owner()
            if state is None:
                continue
            owner = state[0]
            if state != last_state:
                last_state = state
                last_change = time.monotonic()
            if _is_dead_process(owner) or time.monotonic() - last_change > STALE_SECONDS:
                logger.warning(
                    "taking over the data cache from a process that no longer runs (%s)",
                    owner or "unknown",
                )
                self._release(owner)
                # Two processes that take over never delete each other's partial folder.
                if owner:
                    shutil.rmtree(_build_partial_path(folder, owner), ignore_errors=True)
                continue
            if owner and not has_logged:
                logger.info("waiting for another process to prepare the data (%s)", owner)
                has_logged = True
            time.sleep(self._poll_seconds)
        if folder.is_dir():  # built between our check and our acquiring the lock
            return False
        self._heartbeat_thread.start()
        return True

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._heartbeat_thread.is_alive():
            self._heartbeat_thread.join()
        if self._is_acquired:
            self._release(self.identity)

    def _acquire(self) -> bool:
        try:
            handle = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        with os.fdopen(handle, "w") as stream:
            stream.write(self.identity)
        self._is_acquired = True
        return True

    def _read_owner(self) -> tuple[str, float] | None:
        """Return the owner and mtime of the lock, or None if there is no lock.

        Only changes of mtime matter, so clocks of machines need not agree. The owner is "" for
        a moment after the lock is created.
        """
        try:
            return self._path.read_text(), self._path.stat().st_mtime
        except FileNotFoundError:
            return None

    def _release(self, owner: str) -> None:
        with suppress(FileNotFoundError):
            if self._path.read_text() == owner:
                self._path.unlink()

    def _run_heartbeat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):
                os.utime(self._path)


def identify_machine() -> str:
    """Return a word that is the same for processes that can look each other up by number.

    Containers of one image may have equal host names, and containers of one machine a process
    number twice. On Linux the start of the kernel and the namespace of process numbers distinguish
    them.
    """
    words = [socket.gethostname()]
    with suppress(OSError):
        words += [
            Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
            os.readlink("/proc/self/ns/pid"),
        ]
    return "/".join(words)


def _is_dead_process(identity: str) -> bool:
    machine, _, rest = identity.partition(" ")
    pid = rest.partition(" ")[0]
    if machine != identify_machine() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def fingerprint_files(files: Sequence[SourceFile], root: Path) -> list[list[Any]]:
    """Return name, format, record kind, columns and content hash of each file, for cache keys.

    Hashes are saved by path, size, mtime and inode, so that a run need not read a large corpus
    again. A file modified less than two seconds before it was hashed is hashed again next time,
    because a further change could leave the same mtime.

    Raises:
        DataError: A file cannot be read.
    """
    hashes_path = (
        root / "hashes" / f"{compute_key([str(file.path.resolve()) for file in files])}.json"
    )
    try:
        saved_hashes = json.loads(read_text(hashes_path))
    except (OSError, ValueError, RecursionError):
        saved_hashes = {}
    if not isinstance(saved_hashes, dict):  # damaged: hash the files again
        saved_hashes = {}
    new_hashes: dict[str, list[Any]] = {}
    result = []
    for file in files:
        try:
            status = file.path.stat()
            stamp = [status.st_size, status.st_mtime_ns, status.st_ino]
            entry = saved_hashes.get(str(file.path))
            if isinstance(entry, list) and len(entry) == 2 and entry[0] == stamp:
                digest = str(entry[1])
            else:
                digest = _hash_file(file.path)
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", field=str(file.path)) from error
        if time.time() - status.st_mtime > _SETTLED_SECONDS:
            new_hashes[str(file.path)] = [stamp, digest]
        result.append(
            [
                file.name,
                file.format,
                file.compression or "",
                file.records.kind,
                *map(list, file.records.columns),
                digest,
            ]
        )
    if new_hashes != saved_hashes:
        _save_hashes(hashes_path, new_hashes)
    return result


def _hash_file(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open_regular_file(path) as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _save_hashes(path: Path, hashes: Any) -> None:
    """Save hashes; ignore errors, because `build_once` reports an unwritable cache."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(hashes))
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
