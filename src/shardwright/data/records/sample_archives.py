"""Rows of shards: MosaicML's MDS files, WebDataset's tar files, our own files of token ids.

Those of other libraries are read through their packages, which are optional. A sample becomes a
row: the columns of an MDS sample; the fields of a tar sample's `.json` member, and its `.txt`
member as `text`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from shardwright.data.records.token_files import SUFFIX, read_token_file
from shardwright.errors import DataError
from shardwright.files import open_regular_file

ARCHIVE_FORMATS = ("mds", "webdataset", "tokens")
_FORMAT_BY_SUFFIX = {".mds": "mds", ".tar": "webdataset", SUFFIX: "tokens"}
_MDS_COMPRESSIONS = ("br", "bz2", "gz", "snappy", "zstd")
"""Compressions of the MDS writer, which are the last suffix of its files."""
_TEXT_MEMBERS = {"txt": "text", "text": "text"}
_UINT32_BYTES = 4
_MAX_CONFIG_BYTES = 1 << 20

ArchiveRow = tuple[dict[str, Any] | None, str]
"""Values of a sample by column, or None and the reason why it cannot be read."""


def detect_archive_format(path: Path) -> str | None:
    """Return the format that the file's name has in the library that writes it, or None.

    >>> detect_archive_format(Path("shard.00000.mds.zstd")), detect_archive_format(Path("a.zstd"))
    ('mds', None)
    """
    name = path if _find_mds_compression(path) is None else Path(path.stem)
    return _FORMAT_BY_SUFFIX.get(name.suffix.lower())


def strip_compression(path: Path) -> Path:
    """Return the path of the uncompressed shard of a compressed one, else the path itself."""
    return path if _find_mds_compression(path) is None else path.with_suffix("")


def _find_mds_compression(path: Path) -> str | None:
    compression = path.suffix.lower().removeprefix(".")
    is_shard = Path(path.stem).suffix.lower() == ".mds"
    return compression if is_shard and compression in _MDS_COMPRESSIONS else None


def read_archive(path: Path, file_format: str) -> Iterator[ArchiveRow]:
    """Yield every sample of a shard, in order.

    Raises:
        DataError: the package is missing, the file is damaged, or a column needs pickle.
    """
    if file_format == "tokens":
        return ((row, "") for row in read_token_file(path))
    return _read_mds(path) if file_format == "mds" else _read_tar(path)


def _read_mds(path: Path) -> Iterator[ArchiveRow]:
    """Read a shard of MDS version 2: number of samples, offsets, JSON of the columns, samples."""
    try:
        from streaming.base.format.base.reader import FileInfo
        from streaming.base.format.mds.encodings import is_mds_encoding_safe
        from streaming.base.format.mds.reader import MDSReader
    except ImportError as error:
        raise _build_import_error(path, "mosaicml-streaming", "mds", error) from error

    with _open_mds(path) as stream:
        num_bytes = stream.seek(0, io.SEEK_END)
        offsets, columns = _read_mds_head(path, stream, num_bytes)
        for name, encoding in zip(columns["names"], columns["encodings"], strict=True):
            if not is_mds_encoding_safe(encoding):
                raise DataError(
                    "a column of the MDS shard contains pickled objects, which can execute code",
                    field=str(path),
                    got=f"{name}: {encoding}",
                    remedy="Write the dataset with other encodings, such as str, json or ndarray",
                )
        reader = MDSReader(
            str(path.parent),
            "",
            columns["encodings"],
            columns["names"],
            columns["sizes"],
            None,
            [],
            FileInfo(path.name, num_bytes, {}),
            len(offsets) - 1,
            None,
            None,
        )
        for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            stream.seek(begin)
            try:
                sample = reader.decode_sample(stream.read(end - begin))
            except (ValueError, IndexError, UnicodeDecodeError, TypeError) as error:
                yield None, f"not a sample: {error}"
                continue
            yield {name: _convert(value) for name, value in sample.items()}, ""


def _open_mds(path: Path) -> IO[bytes]:
    """Open a shard; one that is compressed is decompressed in memory, by the library that wrote it.

    Offsets are 32-bit, so a shard has less than 4 GiB.
    """
    compression = _find_mds_compression(path)
    stream = open_regular_file(path)
    if compression is None:
        return stream
    from streaming.base.compression import decompress

    with stream:
        try:
            return io.BytesIO(decompress(compression, stream.read()))
        except Exception as error:  # every compression library has its own exceptions
            raise _build_damage_error(path, f"{compression} cannot read it: {error}") from error


def _read_mds_head(
    path: Path, stream: IO[bytes], num_bytes: int
) -> tuple[npt.NDArray[np.int64], dict[str, list[Any]]]:
    """Return the samples' offsets and the end of the last one, and the columns."""
    stream.seek(0)
    head = stream.read(_UINT32_BYTES)
    num_samples = int.from_bytes(head, "little")
    first_offset = _UINT32_BYTES * (num_samples + 2)
    if len(head) < _UINT32_BYTES or first_offset > num_bytes:
        raise _build_damage_error(path, "its header is not that of an MDS shard")
    offsets = np.frombuffer(stream.read(first_offset - _UINT32_BYTES), "<u4").astype(np.int64)
    config_bytes = int(offsets[0]) - first_offset
    if (
        not 0 < config_bytes <= _MAX_CONFIG_BYTES
        or int(offsets[-1]) != num_bytes
        or np.any(np.diff(offsets) < 0)
    ):
        raise _build_damage_error(path, f"it has {num_bytes} bytes, not {int(offsets[-1])}")
    try:
        config = json.loads(stream.read(config_bytes))
        columns = {part: list(config[f"column_{part}"]) for part in ("names", "encodings", "sizes")}
    except (ValueError, KeyError, TypeError) as error:
        raise _build_damage_error(path, f"its columns cannot be read: {error}") from error
    return offsets, columns


def _convert(value: Any) -> Any:
    """Return an array as a list and a numpy number as a Python one."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value


def _read_tar(path: Path) -> Iterator[ArchiveRow]:
    try:
        from webdataset.tariterators import group_by_keys, tar_file_expander
    except ImportError as error:
        raise _build_import_error(path, "webdataset", "webdataset", error) from error
    import tarfile

    with open_regular_file(path) as stream:
        try:
            files = tar_file_expander([{"url": path.name, "stream": stream}])
            for sample in group_by_keys(files):
                yield _build_tar_row(sample)
        except (tarfile.TarError, EOFError, ValueError) as error:
            raise _build_damage_error(path, f"{error}") from error


def _build_tar_row(sample: dict[str, Any]) -> ArchiveRow:
    """Return the row of a sample; members of other kinds, such as images, are ignored."""
    row: dict[str, Any] = {}
    try:
        if "json" in sample:
            content = json.loads(sample["json"])
            if not isinstance(content, dict):
                return None, f"{sample['__key__']}.json is not an object"
            row |= content
        for member, column in _TEXT_MEMBERS.items():
            if member in sample:
                if column in row:
                    return None, f"{sample['__key__']} has two members with the column {column!r}"
                row[column] = sample[member].decode("utf-8")
    except UnicodeDecodeError as error:
        return None, f"{sample['__key__']} is not UTF-8: {error.reason}"
    except (ValueError, RecursionError) as error:
        return None, f"{sample['__key__']}.json is not JSON: {error}"
    if not row:
        members = ", ".join(sorted(name for name in sample if not name.startswith("__")))
        return None, f"{sample['__key__']} has no .json or .txt member, only {members}"
    return row, ""


def _build_import_error(path: Path, package: str, extra: str, error: ImportError) -> DataError:
    return DataError(
        f"reading this file needs the package {package}, which cannot be imported: {error}",
        field=str(path),
        remedy=f"pip install 'shardwright[{extra}]'",
    )


def _build_damage_error(path: Path, reason: str) -> DataError:
    return DataError(f"the file is damaged: {reason}", field=str(path))
