"""Remote sources: fsspec URLs, downloaded once into the cache and then read as files.

Preparation reads the text two or three times and hashes it. That is cheap from a disk but not
over a network, where a change between two passes would also go unnoticed.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.config.data import DataSource
from shardwright.data.data_cache import build_once, compute_key
from shardwright.data.sources.file_listing import METADATA_FILES, is_selected
from shardwright.errors import DataError
from shardwright.store_requests import convert_error, open_file_system, send_request

_BLOCK_BYTES = 1 << 22

DownloadProgressCallback = Callable[[str, int, int], None]
"""Callback for progress: (stage, done, total), in bytes."""


class RemoteFile(NamedTuple):
    """File behind a URL. `version` changes with the content; `num_bytes` may be unknown.

    `tag` is the store's own mark of the content, such as an ETag; empty if it has none.
    """

    path: str
    name: str
    num_bytes: int | None
    version: str
    tag: str


def is_remote(path: str) -> bool:
    """Return True if a path is a URL.

    >>> is_remote("s3://bucket/a.jsonl"), is_remote("data/a.jsonl")
    (True, False)
    """
    return "://" in path


def fetch_sources(
    sources: Sequence[DataSource],
    cache_root: Path,
    field: str,
    progress: DownloadProgressCallback | None = None,
) -> tuple[DataSource, ...]:
    """Replace the URL of each remote source with the path of a copy in the cache `cache_root`.

    Copies are identified by the name, size and version that the remote file system reports; a
    file that changed there is downloaded again.

    Raises:
        DataError: an unknown protocol or one whose package is missing, nothing at the URL, or a
            transfer that fails.
    """
    local_sources = []
    for number, source in enumerate(sources):
        if is_remote(source.path):
            path = _fetch_source(source, cache_root, f"{field}.{number}.path", progress)
            source = source.model_copy(update={"path": str(path)})
        local_sources.append(source)
    return tuple(local_sources)


def _fetch_source(
    source: DataSource, cache_root: Path, field: str, progress: DownloadProgressCallback | None
) -> Path:
    listing = list_remote_files(source, field)
    if isinstance(listing, Path):
        return listing
    file_system, is_file, selected = listing
    stamps = [[file.name, file.num_bytes, file.version] for file in selected]
    total = sum(size for _, size, _ in stamps if isinstance(size, int))
    done = 0

    def report_read(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress("fetching", min(done, total), total)

    def copy(folder: Path) -> None:
        for file in selected:
            _copy_file(file_system, file.path, folder / file.name, field, report_read)

    folder = build_once(cache_root, f"fetched/{compute_key([source.path, stamps])}", copy)
    return folder / selected[0].name if is_file else folder


def list_remote_files(
    source: DataSource, field: str
) -> tuple[Any, bool, tuple[RemoteFile, ...]] | Path:
    """List the files of a URL that the source selects, with metadata files.

    Returns:
        The file system, True if the URL is one file, and the files. If the URL is that of a local
        file or folder, its path.

    Raises:
        DataError: as `fetch_sources`.
    """
    from fsspec.implementations.local import LocalFileSystem

    try:
        file_system, path = open_file_system(source.path)
        if isinstance(file_system, LocalFileSystem):
            return Path(path)
        is_file, info_by_path = send_request(
            f"listing {source.path}", lambda: _list_files(file_system, path)
        )
        base = path.rstrip("/")
        names = {
            remote: remote.rsplit("/", 1)[-1] if is_file else remote[len(base) :].lstrip("/")
            for remote in info_by_path
        }
        files = tuple(
            RemoteFile(
                remote,
                name,
                info_by_path[remote].get("size"),
                str(file_system.ukey(remote)),
                get_content_tag(info_by_path[remote]),
            )
            for remote, name in sorted(names.items())
            if is_file or Path(name).name in METADATA_FILES or is_selected(source, Path(name))
        )
    except (ImportError, ValueError) as error:
        raise DataError(str(error), field=field, got=source.path) from error
    except Exception as error:  # every file system has its own exceptions
        raise DataError(
            f"cannot be reached: {convert_error(error)}", field=field, got=source.path
        ) from None  # the error's text may contain credentials
    if not files:
        raise DataError("the URL has no files to read", field=field, got=source.path)
    return file_system, is_file, files


def get_content_tag(info: Mapping[str, Any]) -> str:
    """Return the mark of a file's content among the store's information; "" if there is none.

    >>> get_content_tag({"name": "bucket/a", "size": 3, "ETag": '"5d41"'})
    '5d41'
    """
    names = ("ETag", "etag", "md5Hash", "generation")
    return next((str(info[name]).strip('"') for name in names if info.get(name)), "")


def _list_files(file_system: Any, path: str) -> tuple[bool, dict[str, Any]]:
    """Return whether the path is a file, and the information about all files at it."""
    file_system.invalidate_cache()
    cause: BaseException | None = None
    try:
        # `isfile` would call a refused request an absent file.
        if (info := file_system.info(path))["type"] == "file":
            return True, {path: info}
    except FileNotFoundError as error:
        cause = error.__cause__  # of http, also a server that does not answer
    files = file_system.find(path, detail=True)
    if not files and isinstance(cause, Exception) and not isinstance(cause, FileNotFoundError):
        raise cause
    return False, files


def _copy_file(
    file_system: Any, remote: str, target: Path, field: str, on_read: Callable[[int], None]
) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    num_reported_bytes = 0

    def copy() -> None:
        nonlocal num_reported_bytes
        num_copied_bytes = 0
        with open(target, "wb") as output, file_system.open(remote, "rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                output.write(block)
                num_copied_bytes += len(block)
                if num_copied_bytes > num_reported_bytes:  # not again in a second attempt
                    on_read(num_copied_bytes - num_reported_bytes)
                    num_reported_bytes = num_copied_bytes

    try:
        send_request(f"reading {remote}", copy)
    except Exception as error:
        if (
            isinstance(error, OSError)
            and error.filename in (str(target), None)
            and error.errno in (errno.EFBIG, errno.ENOSPC)
        ):
            raise  # the local disk is full: `build_once` reports it
        raise DataError(
            f"the transfer failed: {convert_error(error)}", field=field, got=remote
        ) from None
