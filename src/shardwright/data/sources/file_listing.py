"""Files of a recipe's sources: files, folders and datasets saved by Hugging Face `datasets`.

The path of a source must be a regular file or a folder. In a folder FIFOs, sockets and devices
are skipped with a warning, because reading them may never end; a broken link is an error,
because its target would be missing from the data.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from shardwright.config.data import DataSource
from shardwright.data.records.record_formats import build_text_schema
from shardwright.data.records.sample_archives import (
    ARCHIVE_FORMATS,
    detect_archive_format,
    strip_compression,
)
from shardwright.data.records.token_files import SUFFIX as TOKEN_SUFFIX
from shardwright.data.records.token_files import find_missing_files
from shardwright.data.sources.source_reader import COLUMNAR_FORMATS, SourceFile
from shardwright.errors import DataError, explain_missing_path
from shardwright.files import FileKind, detect_file_kind, read_text

logger = logging.getLogger(__name__)

FORMAT_BY_SUFFIX = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
METADATA_FILES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Metadata files that Hugging Face `datasets` writes next to the records."""
COMPRESSION_BY_SUFFIX = {".gz": "gzip", ".zst": "zstd"}
UNSUPPORTED_SUFFIXES = {
    **dict.fromkeys(
        (".xz", ".bz2", ".lz4", ".br"), "decompress it, or compress it with gzip or zstd"
    ),
    **dict.fromkeys((".zip", ".tgz", ".7z", ".rar"), "unpack it and use the folder as the path"),
    ".tar": "unpack it and use the folder as the path, or set `format: webdataset`",
    ".mds": "set `format: mds`",
    TOKEN_SUFFIX: "set `format: tokens`",
    **dict.fromkeys(
        (".csv", ".tsv"), "convert it to JSON lines, or read it as plain text by `format: text`"
    ),
    **dict.fromkeys((".feather", ".orc", ".avro"), "convert it to Parquet"),
    **dict.fromkeys(
        (".npy", ".npz", ".bin", ".pt", ".pkl", ".safetensors", ".pdf", ".docx", ".pyc", ".so"),
        "extract its text first",
    ),
}


def list_files(sources: Sequence[DataSource], field: str) -> tuple[SourceFile, ...]:
    """List the files of `sources`, folders recursively in name order.

    `field` is the recipe's field, for errors.

    Raises:
        DataError: a path that does not exist, an unsupported format, a folder without a match.
    """
    files: list[SourceFile] = []
    for number, source in enumerate(sources):
        where = f"{field}.{number}.path"
        path = Path(source.path)
        kind = _detect_kind(path, where)
        if kind == "folder":
            saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
            source_files = (_list_datasets_folder if saved else _list_folder)(source, path, where)
        elif kind == "regular file":
            if source.glob or source.exclude:
                raise DataError(
                    "`glob` and `exclude` apply to folders, but the path is a file",
                    field=where,
                    got=source.path,
                )
            source_files = [build_source_file(source, path, path.name, where)]
        elif kind == "absent":
            raise DataError(
                "no such file or folder",
                field=where,
                got=source.path,
                remedy=f"{explain_missing_path(source.path)}Relative paths start at {Path.cwd()}",
            )
        else:
            raise DataError(
                f"the path is a {kind}",
                field=where,
                got=source.path,
                allowed="a regular file or a folder: sources are read more than once",
                remedy="Write its content to a regular file and use that",
            )
        repeated = {file.path.resolve() for file in source_files} & {
            file.path.resolve() for file in files
        }
        if repeated:
            logger.warning(
                "%s: %d of its files also belong to an earlier source and are used twice: %s",
                where,
                len(repeated),
                min(repeated),
            )
        files += [replace(file, source_index=number) for file in source_files]
    return tuple(files)


def _detect_kind(path: Path, field: str) -> FileKind:
    try:
        return detect_file_kind(path)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", field=field, got=str(path)) from error


def _list_datasets_folder(source: DataSource, folder: Path, field: str) -> list[SourceFile]:
    """List the Arrow files of a folder written by `datasets.save_to_disk`, in order."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        raise DataError(
            "the folder contains several splits",
            field=field,
            got=source.path,
            allowed=", ".join(str(Path(source.path) / split) for split in splits),
            remedy="Use the path of one of them",
        )
    if source.glob or source.exclude:
        raise DataError(
            "`glob` and `exclude` do not apply to a folder of Hugging Face datasets",
            field=field,
            got=source.path,
        )
    try:
        state = json.loads(read_text(folder / "state.json"))
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"state.json cannot be read: {error}", field=field, got=source.path
        ) from error
    if state.get("_indices_data_files"):
        raise DataError(
            "the dataset selects rows by an index file, which is not supported",
            field=field,
            got=source.path,
            remedy="Save the dataset again with datasets 2.9 or later, which writes those rows",
        )
    if absent := [name for name in names if _detect_kind(folder / name, field) != "regular file"]:
        raise DataError("state.json lists a missing file", field=field, got=ascii(absent[0])[1:-1])
    return [build_source_file(source, folder / name, name, field) for name in names]


def _list_folder(source: DataSource, folder: Path, field: str) -> list[SourceFile]:
    def stop(error: OSError) -> None:
        raise DataError(
            f"a folder cannot be listed: {error.strerror}", field=field, got=error.filename
        )

    files: list[SourceFile] = []
    skipped = Counter[str]()
    irregular: list[str] = []
    for parent, folders, names in os.walk(folder, onerror=stop):
        relative = Path(parent).relative_to(folder)
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and not _is_excluded(source, relative / name)
        ]
        irregular += [
            f"{relative / name} (a link to a folder)"
            for name in folders
            if (Path(parent) / name).is_symlink()
        ]
        for name in names:
            relative_path = relative / name
            if name.startswith(".") or _is_excluded(source, relative_path):
                continue
            if is_selected(source, relative_path):
                kind = _detect_kind(Path(parent) / name, field)
                path = Path(parent) / name
                if kind == "absent":
                    raise DataError(
                        "a symbolic link is broken",
                        field=field,
                        got=str(path),
                        remedy="Restore its target, or skip the link with `exclude`",
                    )
                if kind == "regular file":
                    files.append(build_source_file(source, path, relative_path.as_posix(), field))
                else:
                    irregular.append(f"{relative_path} (a {kind})")
            elif name not in METADATA_FILES:
                skipped[Path(name).suffix or name] += 1
    _log_irregular_files(irregular, field)
    if not files:
        raise DataError(
            f"no file in the folder matches {source.glob!r}"
            if source.glob
            else "no file in the folder has a known format",
            field=field,
            got=source.path,
            allowed=", ".join(FORMAT_BY_SUFFIX) if not source.glob else None,
            remedy=f"It contains {', '.join(sorted(skipped)[:8])} files: set `glob`"
            if skipped
            else "It has no regular file"
            if irregular
            else "The folder is empty",
        )
    if skipped and not source.glob and source.format == "auto":
        _log_unsupported_files(skipped, field)
    check_shard_names(source, [file.name for file in files], field)
    return sorted(files, key=lambda file: Path(file.name).parts)


def _log_irregular_files(names: list[str], field: str) -> None:
    if names:
        logger.warning(
            "%s: skipped, because they are not regular files: %s%s",
            field,
            ", ".join(sorted(names)[:8]),
            f" and {len(names) - 8} more" if len(names) > 8 else "",
        )


def _log_unsupported_files(counts: Counter[str], field: str) -> None:
    listing = ", ".join(f"{number} {suffix}" for suffix, number in sorted(counts.items())[:8])
    logger.warning(
        "%s: skipped files of unsupported formats: %s (see `glob` and `exclude`)", field, listing
    )


def check_shard_names(source: DataSource, names: Collection[str], field: str) -> None:
    """Check that a folder has every shard, and each once.

    Loaders of MosaicML Streaming keep shards compressed and uncompressed if `keep_zip` is set.
    A copy of token files that was interrupted lacks some of them.

    Raises:
        DataError: the folder has a shard twice, or files of token ids are missing that neither
            `glob` nor `exclude` leaves out.
    """
    missing = [] if source.glob or source.exclude else find_missing_files(names)
    if missing:
        raise DataError(
            "a file of token ids is missing",
            field=field,
            got=f"no {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else ""),
            allowed=f"the {len(missing) + len(names)} files that were written",
            remedy="Copy or write them again; select files with `glob` to read only some",
        )
    seen: dict[Path, str] = {}
    for name in sorted(names):
        other = seen.setdefault(strip_compression(Path(name)), name)
        if other != name:
            raise DataError(
                "the folder has a shard twice, compressed and uncompressed",
                field=field,
                got=f"{other} and {name}",
                remedy="Select one of them with `glob` or `exclude`",
            )


def is_hidden(source: DataSource, relative_path: Path) -> bool:
    """Return True if a file or one of its folders is hidden (`.name`) or excluded."""
    paths = [relative_path, *relative_path.parents[:-1]]
    return any(path.name.startswith(".") or _is_excluded(source, path) for path in paths)


def _is_excluded(source: DataSource, relative_path: Path) -> bool:
    return any(
        fnmatch.fnmatchcase(relative_path.as_posix(), pattern)
        or fnmatch.fnmatchcase(relative_path.name, pattern)
        for pattern in source.exclude
    )


def is_selected(source: DataSource, relative_path: Path) -> bool:
    """Return True if a file of a folder is read, given the source's `glob` and `format`."""
    if relative_path.name in METADATA_FILES:
        return False
    if source.glob:
        return fnmatch.fnmatchcase(relative_path.as_posix(), source.glob) or fnmatch.fnmatchcase(
            relative_path.name, source.glob
        )
    known = FORMAT_BY_SUFFIX.get(_split_suffixes(relative_path)[0])
    if source.format in ARCHIVE_FORMATS:
        return detect_archive_format(relative_path) == source.format
    return known is not None and source.format in ("auto", known)


def _split_suffixes(path: Path) -> tuple[str, str]:
    """Return the suffix of the format, and that of the compression or an empty string."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSION_BY_SUFFIX:
        return Path(path.stem).suffix.lower(), suffix
    return suffix, ""


def build_source_file(source: DataSource, path: Path, name: str, field: str) -> SourceFile:
    """Return a file of a source with its format, by the source or by the file's name.

    Raises:
        DataError: the format is not supported.
    """
    suffix, compression_suffix = _split_suffixes(path)
    kind: str = source.format
    if kind == "auto":
        if suffix in UNSUPPORTED_SUFFIXES:
            raise DataError(
                f"{suffix} files are not supported",
                field=field,
                got=str(path),
                allowed="text, JSON, JSON lines (also with .gz or .zst), Parquet or Arrow",
                remedy=UNSUPPORTED_SUFFIXES[suffix][0].upper() + UNSUPPORTED_SUFFIXES[suffix][1:],
            )
        kind = FORMAT_BY_SUFFIX.get(suffix, "text")
    if kind == "text" and source.format == "auto" and detect_archive_format(path) == "mds":
        raise DataError(
            "compressed MDS shards are not text",
            field=field,
            got=str(path),
            remedy="Set `format: mds`",
        )
    if kind in ARCHIVE_FORMATS and detect_archive_format(path) != kind:
        raise DataError(
            f"the file name does not have a suffix of `format: {kind}`",
            field=field,
            got=str(path),
            allowed=".mds, or .mds with a compression of MosaicML Streaming, e.g. .mds.zstd"
            if kind == "mds"
            else ".tar"
            if kind == "webdataset"
            else TOKEN_SUFFIX,
            remedy="Name the folder of the shards, or decompress the file",
        )
    if kind in COLUMNAR_FORMATS and compression_suffix:
        raise DataError(
            f"compressed {kind} files are not supported: {kind} has its own compression",
            field=field,
            got=str(path),
        )
    return SourceFile(
        path,
        name,
        kind,
        None if kind in ARCHIVE_FORMATS else COMPRESSION_BY_SUFFIX.get(compression_suffix),
        build_text_schema(source.text_field),
    )
