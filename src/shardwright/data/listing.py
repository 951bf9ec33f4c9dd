"""Which files the sources of a recipe name: paths, folders below them, and what Hugging Face `datasets` saved.

A path that is named must lead to a regular file or a folder. In a folder FIFOs, sockets and devices are passed over with a
warning, as reading them may never end; a link that leads nowhere is an error, as what it stands for would be missed.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardwright.config.data import Source
from shardwright.data.formats import text_records
from shardwright.data.sources import COLUMNAR, SourceFile
from shardwright.errors import DataError
from shardwright.files import FileKind, file_kind, read_text

log = logging.getLogger(__name__)

FORMAT_OF_SUFFIX = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
NOT_RECORDS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""What Hugging Face `datasets` writes beside the records."""
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
NOT_TEXT = {
    **dict.fromkeys((".xz", ".bz2", ".lz4", ".br"), "decompress it, or compress it with gzip or zstd"),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar"), "unpack it and name the folder"),
    **dict.fromkeys((".csv", ".tsv"), "convert it to JSON lines, or say `format: text` to learn the file as it stands"),
    **dict.fromkeys((".feather", ".orc", ".avro"), "convert it to Parquet"),
    **dict.fromkeys(
        (".npy", ".npz", ".bin", ".pt", ".pkl", ".safetensors", ".pdf", ".docx", ".pyc", ".so"), "extract its text first"
    ),
}


def list_files(sources: Sequence[Source], field: str) -> tuple[SourceFile, ...]:
    """The files of `sources`, folders recursively in name order. `field` is where the recipe names them.

    Raises:
        DataError: a path that is not there, a format that is not read, a folder in which nothing matches.
    """
    files: list[SourceFile] = []
    for number, source in enumerate(sources):
        where = f"{field}.{number}.path"
        path = Path(os.path.expanduser(source.path))
        kind = _kind_of(path, where)
        if kind == "folder":
            saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
            found = (_list_datasets_folder if saved else _list_folder)(source, path, where)
        elif kind == "regular file":
            if source.glob or source.exclude:
                raise DataError("`glob` and `exclude` choose files of a folder; this is a file", field=where, got=source.path)
            found = [_as_file(source, path, path.name, where)]
        elif kind == "absent":
            raise DataError("no such file or folder", field=where, got=source.path, remedy=f"Looked from {Path.cwd()}")
        else:
            raise DataError(
                f"this is a {kind}",
                field=where,
                got=source.path,
                allowed="a regular file or a folder: sources are read more than once",
                remedy="Write what comes from it into a file, and name that",
            )
        again = {file.path.resolve() for file in found} & {file.path.resolve() for file in files}
        if again:
            message = "%s: %d of its files belong to a source before it, too, and are learnt twice: %s"
            log.warning(message, where, len(again), min(again))
        files += [replace(file, source=number) for file in found]
    return tuple(files)


def _kind_of(path: Path, where: str) -> FileKind:
    try:
        return file_kind(path)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", field=where, got=str(path)) from error


def _list_datasets_folder(source: Source, folder: Path, where: str) -> list[SourceFile]:
    """What `datasets.save_to_disk` wrote: its state names the Arrow files in their order."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        raise DataError(
            "this folder holds several splits",
            field=where,
            got=source.path,
            allowed=", ".join(str(Path(source.path) / split) for split in splits),
            remedy="Name one of them",
        )
    if source.glob or source.exclude:
        raise DataError("`glob` and `exclude` do not apply to a folder of Hugging Face datasets", field=where, got=source.path)
    try:
        state = json.loads(read_text(folder / "state.json"))
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"state.json cannot be read: {error}", field=where, got=source.path) from error
    if state.get("_indices_data_files"):
        raise DataError(
            "the rows are chosen by an index file, which is not read",
            field=where,
            got=source.path,
            remedy="Save the dataset again: save_to_disk of datasets 2.9 and later writes the chosen rows",
        )
    if absent := [name for name in names if _kind_of(folder / name, where) != "regular file"]:
        raise DataError("a file that state.json names is not there", field=where, got=ascii(absent[0])[1:-1])
    return [_as_file(source, folder / name, name, where) for name in names]


def _list_folder(source: Source, folder: Path, where: str) -> list[SourceFile]:
    def stop(error: OSError) -> None:
        raise DataError(f"a folder cannot be listed: {error.strerror}", field=where, got=error.filename)

    files, passed_over = [], Counter[str]()
    irregular: list[str] = []
    for parent, folders, names in os.walk(folder, onerror=stop):
        relative = Path(parent).relative_to(folder)
        folders[:] = [name for name in folders if not name.startswith(".") and not _excluded(source, relative / name)]
        irregular += [f"{relative / name} (a link to a folder)" for name in folders if (Path(parent) / name).is_symlink()]
        for name in names:
            below = relative / name
            if name.startswith(".") or _excluded(source, below):
                continue
            if is_chosen(source, below):
                kind = _kind_of(Path(parent) / name, where)
                if kind == "absent":
                    raise DataError(
                        "a link leads nowhere",
                        field=where,
                        got=str(Path(parent) / name),
                        remedy="Fetch what it stands for, or leave it out with `exclude`",
                    )
                if kind == "regular file":
                    files.append(_as_file(source, Path(parent) / name, below.as_posix(), where))
                else:
                    irregular.append(f"{below} (a {kind})")
            elif name not in NOT_RECORDS:
                passed_over[Path(name).suffix or name] += 1
    if irregular:
        more = f" and {len(irregular) - 8} more" if len(irregular) > 8 else ""
        log.warning("%s: passed over, as they are no regular files: %s%s", where, ", ".join(sorted(irregular)[:8]), more)
    if not files:
        raise DataError(
            f"no file in this folder matches {source.glob!r}" if source.glob else "no file in this folder has a known format",
            field=where,
            got=source.path,
            allowed=", ".join(FORMAT_OF_SUFFIX) if not source.glob else None,
            remedy=f"It holds {', '.join(sorted(passed_over)[:8])} files: choose with `glob`" if passed_over else "It is empty",
        )
    if passed_over and not source.glob and source.format == "auto":
        told = ", ".join(f"{number} {suffix}" for suffix, number in sorted(passed_over.items())[:8])
        log.warning("%s: files passed over, whose format is not read: %s (`glob` chooses, `exclude` leaves out)", where, told)
    return sorted(files, key=lambda file: Path(file.name).parts)


def _excluded(source: Source, below: Path) -> bool:
    return any(
        fnmatch.fnmatchcase(below.as_posix(), pattern) or fnmatch.fnmatchcase(below.name, pattern) for pattern in source.exclude
    )


def is_chosen(source: Source, below: Path) -> bool:
    """Whether a file of a folder is one to read, by the source's `glob` and `format`."""
    if below.name in NOT_RECORDS:
        return False
    if source.glob:
        return fnmatch.fnmatchcase(below.as_posix(), source.glob) or fnmatch.fnmatchcase(below.name, source.glob)
    known = FORMAT_OF_SUFFIX.get(_suffixes(below)[0])
    return known is not None and source.format in ("auto", known)


def _suffixes(path: Path) -> tuple[str, str]:
    """The suffix that tells the format, and that of a compression around it (or an empty string)."""
    last = path.suffix.lower()
    if last in COMPRESSIONS:
        return Path(path.stem).suffix.lower(), last
    return last, ""


def _as_file(source: Source, path: Path, name: str, where: str) -> SourceFile:
    suffix, around = _suffixes(path)
    kind: str = source.format
    if kind == "auto":
        if suffix in NOT_TEXT:
            raise DataError(
                f"{suffix} files are not read",
                field=where,
                got=str(path),
                allowed="text, JSON, JSON lines or Parquet, also with .gz or .zst around text and JSON, and Arrow",
                remedy=NOT_TEXT[suffix][0].upper() + NOT_TEXT[suffix][1:],
            )
        kind = FORMAT_OF_SUFFIX.get(suffix, "text")
    if kind in COLUMNAR and around:
        raise DataError(f"{kind} compresses itself; a compressed file of it is not read", field=where, got=str(path))
    return SourceFile(path, name, kind, COMPRESSIONS.get(around), text_records(source.text_field))
