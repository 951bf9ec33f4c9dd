"""Reading of files that a user names, bounded in time and size whatever the files are; the folder
of caches.

Opening a FIFO waits for its writer, and reading a terminal or /dev/zero never ends. So only
regular files are opened, and text that is loaded whole has a largest size. Every failure is an
OSError with a readable `strerror`, which callers turn into their own errors.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import select
import stat
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

logger = logging.getLogger("shardwright")

MAX_TEXT_BYTES = 256 * 1024**2
"""Largest file that is read as one text by default. A tokenizer.json takes up to about 40 MB.
"""
_BLOCK_BYTES = 1 << 16

FileKind = Literal[
    "regular file", "folder", "FIFO", "socket", "character device", "block device", "absent"
]

_KINDS: tuple[tuple[int, FileKind], ...] = (
    (stat.S_IFREG, "regular file"),
    (stat.S_IFDIR, "folder"),
    (stat.S_IFIFO, "FIFO"),
    (stat.S_IFSOCK, "socket"),
    (stat.S_IFCHR, "character device"),
    (stat.S_IFBLK, "block device"),
)


def find_user_cache() -> Path:
    """Return ~/.cache/shardwright; without a home, a folder of the user's among temporary files.

    A container may run under a user id that has no account, with HOME not set.
    """
    try:
        return Path.home() / ".cache" / "shardwright"
    except RuntimeError:
        folder = Path(tempfile.gettempdir()) / f"shardwright-cache-{os.getuid()}"
        _warn_of_missing_home(folder)
        return folder


@cache
def _warn_of_missing_home(folder: Path) -> None:
    logger.warning(
        "HOME is not set and user %d has no account, so caches are in %s; set SHARDWRIGHT_CACHE to "
        "a folder that stays",
        os.getuid(),
        folder,
    )


def detect_file_kind(path: str | Path) -> FileKind:
    """Return the kind of file at a path, following links, without opening it.

    Raises:
        OSError: the path cannot be followed: it is too long, its links form a loop, or a folder
            on it is not accessible.
    """
    try:
        return _classify_mode(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return "absent"
    except ValueError as error:
        raise _build_null_byte_error(path) from error


def open_regular_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading, without blocking.

    Raises:
        OSError: the file cannot be opened, or it is of another kind.
    """
    return io.BufferedReader(_RegularFile(_open_kind(path, ("regular file",)), "rb"))


class _RegularFile(io.FileIO):
    """File whose reads never block. Some files below /proc count as regular and have no end."""

    def readinto(self, buffer: Any) -> int:
        num_bytes = super().readinto(buffer)
        if num_bytes is None:
            raise OSError(errno.EAGAIN, "it has no end and no data to read now")
        return num_bytes


def read_text(
    path: str | Path, *, max_bytes: int = MAX_TEXT_BYTES, pipe_seconds: float = 0.0
) -> str:
    """Read a whole file as UTF-8; a byte-order mark is removed, and line ends become \\n.

    Args:
        pipe_seconds: longest time that a pipe (`<(...)`, /dev/stdin) may stay silent, in
            seconds. 0 refuses pipes.

    Raises:
        OSError: the file cannot be opened, is of another kind, is larger than `max_bytes`, or a
            pipe stays silent.
        UnicodeDecodeError: the content is not UTF-8.
    """
    descriptor = _open_kind(path, ("regular file", "FIFO") if pipe_seconds else ("regular file",))
    with os.fdopen(descriptor, "rb", buffering=0) as stream:
        content = bytearray()
        while len(content) <= max_bytes:
            if pipe_seconds:
                _wait_readable(descriptor, path, pipe_seconds)
            block = stream.read(_BLOCK_BYTES)
            if block is None:  # another reader of the pipe was faster
                continue
            if not block:
                return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
            content += block
    raise OSError(errno.EFBIG, f"it is larger than {max_bytes // 1024:,} KiB, the limit", str(path))


def _open_kind(path: str | Path, allowed: tuple[FileKind, ...]) -> int:
    try:
        # Without O_NONBLOCK opening a FIFO waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise _build_null_byte_error(path) from error
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(
                errno.EINVAL, "it is a socket or a device, not a regular file", str(path)
            ) from error
        raise
    kind = _classify_mode(os.fstat(descriptor).st_mode)
    if kind in allowed:
        return descriptor
    os.close(descriptor)
    if kind == "folder":
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, f"it is a {kind}, not a regular file", str(path))


def _classify_mode(mode: int) -> FileKind:
    return next(
        (kind for number, kind in _KINDS if stat.S_IFMT(mode) == number), "character device"
    )


def _wait_readable(descriptor: int, path: str | Path, seconds: float) -> None:
    """Wait until a read would not block. Regular files are always ready."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + seconds
    while (remaining_seconds := deadline - time.monotonic()) > 0:
        if poll.poll(1000 * remaining_seconds):
            return
    raise OSError(errno.ETIMEDOUT, f"nothing was written to this pipe for {seconds:g} s", str(path))


def _build_null_byte_error(path: str | Path) -> OSError:
    return OSError(errno.EINVAL, "the path contains a null byte", str(path))
