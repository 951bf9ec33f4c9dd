"""Work that is done once and kept: folders named by what they were made from.

A folder of the cache is complete or absent: it is filled under a temporary name and renamed. Ranks and runs that want the
same folder race for a lock; one does the work, the others wait. The lock only saves work: should two ever hold it (a
stale lock taken over by both), both make the same folder and the first rename wins.
"""

from __future__ import annotations

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

from shardwright.data.sources import SourceFile
from shardwright.errors import DataError
from shardwright.files import open_regular, read_text

HEARTBEAT_SECONDS = 2.0
STALE_SECONDS = 30.0
"""A lock that has not been touched for so long belongs to a process that is gone (on another machine; here we look)."""
_SETTLED_SECONDS = 2.0
_BLOCK_BYTES = 1 << 20

log = logging.getLogger(__name__)


def cache_root(configured: str | None) -> Path:
    """The folder of the cache: the recipe's, or $SHARDWRIGHT_CACHE/data, or ~/.cache/shardwright/data."""
    if configured is not None:
        return Path(os.path.expanduser(configured))
    base = os.environ.get("SHARDWRIGHT_CACHE")
    return (Path(base) if base else Path.home() / ".cache" / "shardwright") / "data"


def key_of(value: Any) -> str:
    """A folder name for a JSON value."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def build_once(root: Path, name: str, build: Callable[[Path], None], *, poll_seconds: float = 0.1) -> Path:
    """The folder `root/name`, filled by `build` unless it is there; safe among processes and machines on one file system.

    Raises:
        DataError: the cache cannot be written, a full disk for one. What was written is removed.
        Whatever `build` raises.
    """
    folder = root / name
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _Lock(folder.with_name(folder.name + ".lock"), poll_seconds) as lock:
            if lock.wait_for(folder):
                _fill(folder, build, lock.identity)
    except OSError as error:
        raise DataError(
            f"the cache of tokenised data cannot be written: {error.strerror or error}",
            field="data.cache_dir",
            got=str(error.filename or folder),
            remedy="Free space there, or name another folder",
        ) from error
    return folder


def _fill(folder: Path, build: Callable[[Path], None], identity: str) -> None:
    partial = _partial(folder, identity)
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


def _partial(folder: Path, identity: str) -> Path:
    """Where the owner of a lock fills the folder, by the last word of its identity."""
    return folder.with_name(f"{folder.name}.{identity.rpartition(' ')[2]}.partial")


class _Lock:
    """A file that says who works; touched while they do."""

    def __init__(self, path: Path, poll_seconds: float) -> None:
        self._path = path
        self._poll_seconds = poll_seconds
        self.identity = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(4)}"
        self._held = False
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> _Lock:
        return self

    def wait_for(self, folder: Path) -> bool:
        """True once the lock is ours; False as soon as somebody else has made `folder`."""
        told = False
        watched, since = None, time.monotonic()
        while not self._take():
            if folder.is_dir():
                return False
            seen = self._look()
            if seen is None:
                continue
            owner = seen[0]
            if seen != watched:
                watched, since = seen, time.monotonic()
            if _is_dead_here(owner) or time.monotonic() - since > STALE_SECONDS:
                log.warning("taking over the data cache from a process that is gone (%s)", owner or "unknown")
                self._break(owner)
                if owner:  # what that process has left; of two that take over, neither touches what the other makes
                    shutil.rmtree(_partial(folder, owner), ignore_errors=True)
                continue
            if owner and not told:
                log.info("waiting for another process to prepare the data (%s)", owner)
                told = True
            time.sleep(self._poll_seconds)
        if folder.is_dir():  # made between our first look and our taking the lock
            return False
        self._heart.start()
        return True

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._heart.is_alive():
            self._heart.join()
        if self._held:
            self._break(self.identity)

    def _take(self) -> bool:
        try:
            handle = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        with os.fdopen(handle, "w") as stream:
            stream.write(self.identity)
        self._held = True
        return True

    def _look(self) -> tuple[str, float] | None:
        """Owner and last touch. Only changes of the touch are looked at, so clocks of machines need not agree.

        The owner is "" for a moment after the lock is made; None when there is no lock.
        """
        try:
            return self._path.read_text(), self._path.stat().st_mtime
        except FileNotFoundError:
            return None

    def _break(self, owner: str) -> None:
        with suppress(FileNotFoundError):
            if self._path.read_text() == owner:
                self._path.unlink()

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):
                os.utime(self._path)


def _is_dead_here(identity: str) -> bool:
    host, _, rest = identity.partition(" ")
    pid = rest.partition(" ")[0]
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def fingerprint(files: Sequence[SourceFile], root: Path) -> list[list[Any]]:
    """What a list of files holds and how it is read: name, format, kind of records, columns and a hash of the bytes.

    Hashes are remembered by path, size and time of change, so that a large corpus is not read again by every run. A file
    changed less than two seconds before it was hashed is hashed again next time: it may change once more unnoticed.
    """
    memory_path = root / "hashes" / f"{key_of([str(file.path.resolve()) for file in files])}.json"
    try:
        memory = json.loads(read_text(memory_path))
    except (OSError, ValueError, RecursionError):
        memory = {}
    if not isinstance(memory, dict):  # damaged: hashes are made again
        memory = {}
    remembered: dict[str, list[Any]] = {}
    result = []
    for file in files:
        try:
            status = file.path.stat()
            stamp = [status.st_size, status.st_mtime_ns, status.st_ino]
            known = memory.get(str(file.path))
            if isinstance(known, list) and len(known) == 2 and known[0] == stamp:
                digest = str(known[1])
            else:
                digest = _hash(file.path)
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", field=str(file.path)) from error
        if time.time() - status.st_mtime > _SETTLED_SECONDS:
            remembered[str(file.path)] = [stamp, digest]
        result.append([file.name, file.format, file.compression or "", file.records.kind, *map(list, file.records.columns), digest])
    if remembered != memory:
        _remember(memory_path, remembered)
    return result


def _hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open_regular(path) as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _remember(path: Path, value: Any) -> None:
    """Best effort: without it the next run hashes again. A cache that cannot be written at all is told of by build_once."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(value))
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
