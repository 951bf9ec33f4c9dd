"""Where text comes from: files of a recipe's sources, read record by record without ever holding a whole corpus.

A text file is one document; a line of JSON lines or a row of Parquet is one record: a document, a conversation, or another of
the kinds of `formats`. A record that cannot be read is not an exception but a `Broken`, with file and line, so that one bad
line does not stop a corpus of millions.
"""

from __future__ import annotations

import codecs
import fnmatch
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.config.data import Source
from shardwright.data.formats import KINDS, Records, Unusable, recognise, text_records
from shardwright.data.records import column_types, holds_strings, open_stream, read_rows, refuse_utf_16
from shardwright.errors import DataError

log = logging.getLogger(__name__)

PIECE_CHARACTERS = 256 * 1024
"""A text file is read in pieces of about this size, so that a file of any size costs the same memory."""

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
NUM_ROWS_LOOKED_AT = 64
_TEXT_FIELD = Source.model_fields["text_field"].default
COLUMNAR = ("parquet", "arrow")
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


@dataclass(frozen=True)
class SourceFile:
    """One file: where it is, how it is called below its source's path, and how to read it."""

    path: Path
    name: str
    format: str
    compression: str | None
    records: Records
    source: int = 0
    """Number of the source in the recipe's list."""


class Piece(NamedTuple):
    """A stretch of one document's text. `record` counts documents and broken records over all files, from 0.

    `canonical`: what the text is (see `formats`); other than plain text it is a whole record, and file and line are its place.
    """

    text: str
    record: int
    begins: bool
    ends: bool
    canonical: str = "text"
    file: str = ""
    line: int = 0
    source: int = 0


class Broken(NamedTuple):
    """A record that is set aside. It may follow pieces of the same record: a file is found not to be UTF-8 on the way.

    `harmless`: an empty file, which holds nothing that could be lost.
    """

    record: int
    file: str
    line: int
    reason: str
    harmless: bool = False


def list_files(sources: Sequence[Source], field: str) -> tuple[SourceFile, ...]:
    """The files of `sources`, folders recursively in name order. `field` is where the recipe names them.

    Raises:
        DataError: a path that is not there, a format that is not read, a folder in which nothing matches.
    """
    files: list[SourceFile] = []
    for number, source in enumerate(sources):
        where = f"{field}.{number}.path"
        path = Path(os.path.expanduser(source.path))
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            found = _list_datasets_folder(source, path, where)
        elif path.is_dir():
            found = _list_folder(source, path, where)
        elif path.is_file():
            if source.glob or source.exclude:
                raise DataError("`glob` and `exclude` choose files of a folder; this is a file", field=where, got=source.path)
            found = [_as_file(source, path, path.name, where)]
        else:
            raise DataError("no such file or folder", field=where, got=source.path, remedy=f"Looked from {Path.cwd()}")
        again = {file.path.resolve() for file in found} & {file.path.resolve() for file in files}
        if again:
            message = "%s: %d of its files belong to a source before it, too, and are learnt twice: %s"
            log.warning(message, where, len(again), min(again))
        files += [replace(file, source=number) for file in found]
    return tuple(files)


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
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"state.json cannot be read: {error}", field=where, got=source.path) from error
    if state.get("_indices_data_files"):
        raise DataError(
            "the rows are chosen by an index file, which is not read",
            field=where,
            got=source.path,
            remedy="Save the dataset again: save_to_disk of datasets 2.9 and later writes the chosen rows",
        )
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise DataError("a file that state.json names is not there", field=where, got=absent[0])
    return [_as_file(source, folder / name, name, where) for name in names]


def _list_folder(source: Source, folder: Path, where: str) -> list[SourceFile]:
    def stop(error: OSError) -> None:
        raise DataError(f"a folder cannot be listed: {error.strerror}", field=where, got=error.filename)

    files, passed_over = [], Counter[str]()
    for parent, folders, names in os.walk(folder, onerror=stop):
        relative = Path(parent).relative_to(folder)
        folders[:] = [name for name in folders if not name.startswith(".") and not _excluded(source, relative / name)]
        for name in names:
            below = relative / name
            if name.startswith(".") or _excluded(source, below):
                continue
            if is_chosen(source, below):
                files.append(_as_file(source, Path(parent) / name, below.as_posix(), where))
            elif name not in NOT_RECORDS:
                passed_over[Path(name).suffix or name] += 1
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


def identify(files: Sequence[SourceFile], sources: Sequence[Source], field: str) -> tuple[SourceFile, ...]:
    """The files with what their records hold, found by looking at the first records of each source.

    Raises:
        DataError: records that could be of several kinds, columns of the recipe that are not there, a file that cannot be read,
            text files among those of conversations or the like.
    """
    found: list[SourceFile] = []
    for number, source in enumerate(sources):
        mine = [file for file in files if file.source == number]
        with_records = [file for file in mine if file.format != "text"]
        where = f"{field}.{number}"
        if not with_records and (source.columns or source.records not in ("auto", "text")):
            raise DataError("text files have no records", field=f"{where}.records", got=source.records, allowed="text or auto")
        rows = _first_rows(with_records)
        asked = "text" if source.records == "auto" and source.text_field != _TEXT_FIELD else source.records
        records = recognise(rows, asked, source.columns, source.text_field, where)
        if records.kind != "text" and source.format == "auto" and (texts := [file for file in mine if file.format == "text"]):
            raise DataError(
                f"text files lie among files of {KINDS[records.kind].summary}, and would be learnt whole",
                field=f"{where}.path",
                got=", ".join(file.name for file in texts[:4]) + (f" and {len(texts) - 4} more" if len(texts) > 4 else ""),
                remedy=f"Leave them out (`exclude: [{texts[0].name!r}]`), or name them as a source of their own",
            )
        found += [file if file.format == "text" else replace(file, records=records) for file in mine]
    return tuple(found)


def _first_rows(files: Sequence[SourceFile]) -> list[dict[str, Any]]:
    """The first records that can be read: enough to see the columns that are often empty."""
    rows: list[dict[str, Any]] = []
    for file in files:
        try:
            for row in read_rows(file.path, file.format, file.compression):
                if row.value is not None:
                    rows.append(row.value)
                if len(rows) == NUM_ROWS_LOOKED_AT:
                    return rows
        except (OSError, EOFError, ValueError) as error:
            raise DataError(f"cannot be read: {error}", field=str(file.path)) from error
        if rows:
            return rows
    return rows


def read_files(files: Sequence[SourceFile]) -> Iterator[Piece | Broken]:
    """Every record of the files in order, as pieces of text or as broken.

    Raises:
        DataError: a file that cannot be opened or is damaged as a whole, a column that is not there, or something asked for
            that is not done.
    """
    record = 0
    for file in files:
        read = _read_text if file.format == "text" else _read_records
        try:
            empty = True
            for item in read(file, record):
                empty, record = False, item.record
                yield item._replace(source=file.source) if isinstance(item, Piece) and file.source else item
            if empty:
                yield Broken(record, file.name, 1, "an empty file", harmless=True)
        except (OSError, EOFError, ValueError) as error:  # ValueError: pyarrow's ArrowInvalid is one
            raise DataError(f"cannot be read: {error}", field=str(file.path)) from error
        record += 1


def _read_text(file: SourceFile, record: int) -> Iterator[Piece | Broken]:
    refuse_utf_16(file.path, file.compression)
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    pending: list[str] = []
    num_pending, line, begins, blank = 0, 1, True, True
    with open_stream(file.path, file.compression) as stream:
        while True:
            block = stream.read(PIECE_CHARACTERS)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line += bytes(error.object)[: error.start].count(b"\n")
                yield Broken(record, file.name, line, f"not UTF-8: {error.reason}")
                return
            line += text.count("\n")
            blank = blank and not text.strip()
            pending.append(text)
            num_pending += len(text)
            if not block:
                break
            if num_pending >= PIECE_CHARACTERS and (cut := _place_to_cut(pending)):
                yield Piece(cut, record, begins, False)
                num_pending, begins = len(pending[0]), False
    if blank:
        yield Broken(record, file.name, 1, "an empty file", harmless=True)
    else:
        yield Piece("".join(pending), record, begins, True)


def _place_to_cut(pending: list[str]) -> str:
    """Takes from `pending` all text up to the end of its last line that borders on no other white space.

    There a tokenizer that splits words before it merges is most likely to split too; the caller checks. Returns "" and
    leaves `pending` when there is no such place, which lets the piece grow.
    """
    recent = "".join(pending[-2:])
    end = len(recent)
    while (end := recent.rfind("\n", 1, end)) > 0:
        if end + 1 < len(recent) and not recent[end - 1].isspace() and not recent[end + 1].isspace():
            head = "".join(pending[:-2]) + recent[: end + 1]
            pending[:] = [recent[end + 1 :]]
            return head
    return ""


def _read_records(file: SourceFile, record: int) -> Iterator[Piece | Broken]:
    for number, row in enumerate(read_rows(file.path, file.format, file.compression, file.records.column_names())):
        if number == 0 and file.format in COLUMNAR:  # of no rows nobody knows the columns
            _check_columns(file)
        text, reason, canonical = "", row.reason, ""
        if row.value is not None:
            try:
                canonical, text = file.records.read(row.value)
            except Unusable as error:
                reason = str(error)
        if reason:
            yield Broken(record, file.name, row.line, reason)
        else:
            yield Piece(text, record, True, True, canonical, file.name, row.line)
        record += 1


def _check_columns(file: SourceFile) -> None:
    """A column that is missing from a typed file is no accident of one record."""
    kinds = column_types(file.path, file.format)
    required = set(KINDS[file.records.kind].required)
    for role, name in file.records.columns:
        if role not in required:
            continue
        if name not in kinds:
            raise DataError("no such column", field=str(file.path), got=name, allowed=", ".join(kinds))
        if file.records.kind == "text" and not holds_strings(kinds[name]):
            raise DataError("the column holds no strings", field=str(file.path), got=f"{name}: {kinds[name]}", allowed="string")
