"""Sources that lie elsewhere: an fsspec URL is fetched once into the cache and read from there like any file.

Training reads its tokens from a memory map; the text itself is read two or three times, and hashed. From a disk that is free,
over a network it is not, and a corpus that changes between two passes would be silent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardwright.config.data import Source
from shardwright.data.cache import build_once, key_of
from shardwright.data.listing import NOT_RECORDS, is_chosen
from shardwright.errors import DataError

_BLOCK_BYTES = 1 << 22

Progress = Callable[[str, int, int], None]
"""Told what is being done, and how far: (stage, done, total), in bytes."""


def is_remote(path: str) -> bool:
    """Whether a path is a URL.

    >>> is_remote("s3://bucket/a.jsonl"), is_remote("data/a.jsonl")
    (True, False)
    """
    return "://" in path


def localise(sources: Sequence[Source], root: Path, field: str, progress: Progress | None = None) -> tuple[Source, ...]:
    """The sources with every URL replaced by a file or folder of the cache `root`.

    What was fetched is kept under the name, size and version that the remote file system tells; a file that changed there is
    fetched again.

    Raises:
        DataError: an unknown protocol or one whose package is missing, nothing at the URL, or a transfer that fails.
    """
    here = []
    for number, source in enumerate(sources):
        if is_remote(source.path):
            path = _fetch(source, root, f"{field}.{number}.path", progress)
            source = source.model_copy(update={"path": str(path)})
        here.append(source)
    return tuple(here)


def _fetch(source: Source, root: Path, where: str, progress: Progress | None) -> Path:
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    try:
        files, path = fsspec.core.url_to_fs(source.path)
        if isinstance(files, LocalFileSystem):
            return Path(path)
        single = bool(files.isfile(path))
        found = {path: files.info(path)} if single else files.find(path, detail=True)
        base = path.rstrip("/")
        names = {remote: remote.rsplit("/", 1)[-1] if single else remote[len(base) :].lstrip("/") for remote in found}
        chosen = {
            remote: name
            for remote, name in names.items()
            if single or Path(name).name in NOT_RECORDS or is_chosen(source, Path(name))
        }
        stamps = [[name, found[remote].get("size"), str(files.ukey(remote))] for remote, name in sorted(chosen.items())]
    except ImportError as error:
        raise DataError(str(error), field=where, got=source.path) from error
    except Exception as error:  # every file system has its own
        raise DataError(f"cannot be reached: {error}", field=where, got=source.path) from error
    if not chosen:
        raise DataError("nothing to read there", field=where, got=source.path)

    total, done = sum(size for _, size, _ in stamps if isinstance(size, int)), 0

    def told(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress("fetching", min(done, total), total)

    def copy(folder: Path) -> None:
        for remote, name in chosen.items():
            _copy(files, remote, folder / name, where, told)

    folder = build_once(root, f"fetched/{key_of([source.path, stamps])}", copy)
    return folder / next(iter(chosen.values())) if single else folder


def _copy(files: Any, remote: str, target: Path, where: str, on_read: Callable[[int], None]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "wb") as written:
        try:
            with files.open(remote, "rb") as stream:
                while block := stream.read(_BLOCK_BYTES):
                    written.write(block)
                    on_read(len(block))
        except Exception as error:
            if isinstance(error, OSError) and error.filename in (str(target), None) and error.errno in (27, 28):
                raise  # our own disk: the cache says so
            raise DataError(f"the transfer failed: {error}", field=where, got=remote) from error
