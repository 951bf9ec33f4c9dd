"""Shards of streamed sources: every file that the sources select is one shard."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.config.data import DataSource
from shardwright.data.data_cache import compute_key
from shardwright.data.sources.file_listing import (
    METADATA_FILES,
    build_source_file,
    check_shard_names,
    is_hidden,
    list_files,
)
from shardwright.data.sources.remote_sources import (
    RemoteFile,
    get_content_tag,
    is_remote,
    list_remote_files,
)
from shardwright.data.sources.source_reader import SourceFile
from shardwright.errors import DataError
from shardwright.store_requests import convert_error, read_range, send_request

RANGE_BYTES = 8 * 1024**2
"""Bytes of one request. A fetch has `_NUM_REQUESTS` of them in memory."""
_NUM_REQUESTS = 4


@dataclass(frozen=True)
class SourceShard:
    """One file of a streamed source. `version` changes with its content.

    `file.path` is the path of a local file; the file of a store has no local path before `fetch`.
    """

    file: SourceFile
    url: str
    num_bytes: int
    version: str
    field: str
    file_system: Any = None
    remote_path: str = ""
    tag: str = ""
    """The store's own mark of the content; empty if it has none."""

    @property
    def fetched_bytes(self) -> int:
        """Bytes on disk while the shard is tokenised; 0 for a local file, which is not copied."""
        return 0 if self.file_system is None else self.num_bytes

    @property
    def stamp(self) -> list[Any]:
        """Values that identify the content without reading it."""
        return [self.url, self.num_bytes, self.version, self.file.format, self.file.compression]

    def fetch(self, folder: Path) -> SourceFile:
        """Return the shard as a local file; a file of a store is copied into `folder`.

        Raises:
            DataError: the transfer fails, or the file is another one than when it was listed.
        """
        if self.file_system is None:
            return self.file
        target = folder / "fetched" / Path(self.file.name).name
        target.parent.mkdir()
        try:
            self._copy(target)
            self.file_system.invalidate_cache()
            info = send_request(
                f"looking up {self.url}", lambda: self.file_system.info(self.remote_path)
            )
        except DataError:
            raise
        except Exception as error:  # every file system has its own exceptions
            if isinstance(error, OSError) and error.filename == str(target):
                raise  # the local disk
            raise DataError(
                f"the transfer failed: {convert_error(error)}", field=self.field, got=self.url
            ) from None  # the error's text may contain credentials
        if self.tag and get_content_tag(info) != self.tag:
            raise DataError(
                "a file changed since the run listed its sources",
                field=self.field,
                got=self.url,
                remedy="Start the run again; do not change the data during a run",
            )
        return replace(self.file, path=target)

    def _copy(self, target: Path) -> None:
        """Read ranges of the file, several at the same time, and write them to `target`."""
        starts = range(0, self.num_bytes, RANGE_BYTES)

        def read(start: int) -> bytes:
            end = min(start + RANGE_BYTES, self.num_bytes)
            content = read_range(self.file_system, self.remote_path, start, end, self.url)
            if len(content) != end - start:
                raise DataError(
                    "a file is shorter than its store reported",
                    field=self.field,
                    got=f"{self.url}: {len(content)} bytes from {start} on",
                    allowed=f"{end - start} bytes",
                )
            return content

        with ThreadPoolExecutor(_NUM_REQUESTS, "fetch-shard") as pool, open(target, "wb") as output:
            for first in range(0, len(starts), _NUM_REQUESTS):
                for content in pool.map(read, starts[first : first + _NUM_REQUESTS]):
                    output.write(content)


def list_shards(sources: Sequence[DataSource], field: str) -> tuple[SourceShard, ...]:
    """List the files of all sources: by source, then in name order.

    Raises:
        DataError: a source that does not exist or cannot be reached, a format that is not
            supported, a store that does not report the size of its files.
    """
    shards: list[SourceShard] = []
    for number, source in enumerate(sources):
        where = f"{field}.{number}.path"
        listing = list_remote_files(source, where) if is_remote(source.path) else Path(source.path)
        if isinstance(listing, Path):
            local = source.model_copy(update={"path": str(listing)})
            for file in list_files([local], field):
                status = file.path.stat()
                version = f"{status.st_mtime_ns} {status.st_ino}"
                url = str(file.path.resolve())
                file = replace(file, source_index=number)
                shards.append(SourceShard(file, url, status.st_size, version, where))
            continue
        file_system, is_file, files = listing
        shards += _list_remote_shards(source, number, where, file_system, is_file, files)
    return tuple(shards)


def _list_remote_shards(
    source: DataSource,
    number: int,
    field: str,
    file_system: Any,
    is_file: bool,
    files: Sequence[RemoteFile],
) -> list[SourceShard]:
    if any(Path(file.name).name in ("state.json", "dataset_dict.json") for file in files):
        raise DataError(
            "a folder of Hugging Face datasets in a store cannot be streamed",
            field=field,
            got=source.path,
            allowed="files of text, JSON lines, Parquet or Arrow",
            remedy="Write the dataset with `to_parquet`, in several files",
        )
    shards = []
    for file in sorted(files, key=lambda file: Path(file.name).parts):
        is_metadata = Path(file.name).name in METADATA_FILES
        if not is_file and (is_metadata or is_hidden(source, Path(file.name))):
            continue
        if not isinstance(file.num_bytes, int):
            raise DataError(
                "the store does not report the size of a file, which streaming needs",
                field=field,
                got=file.name,
            )
        source_file = build_source_file(source, Path(file.name), file.name, field)
        url = source.path if is_file else f"{source.path.rstrip('/')}/{file.name}"
        shards.append(
            SourceShard(
                replace(source_file, source_index=number),
                url,
                file.num_bytes,
                file.tag or file.version,
                field,
                file_system,
                file.path,
                file.tag,
            )
        )
    if not is_file:
        check_shard_names(source, [shard.file.name for shard in shards], field)
    if not shards:
        raise DataError("the URL has no files to read", field=field, got=source.path)
    return shards


def compute_shard_key(shard: SourceShard, settings: Any) -> str:
    """Return the key of a tokenised shard: a hash of its file and of all that its tokens need."""
    file = shard.file
    return compute_key([shard.stamp, file.records.kind, list(file.records.columns), settings])
