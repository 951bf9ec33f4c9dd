"""Where text comes from: files of a recipe's sources, read record by record without ever holding a whole corpus.

A text file is one document; a line of JSON lines or a row of Parquet is one document. A record that cannot be read is
not an exception but a `Broken`, with file and line, so that one bad line does not stop a corpus of millions.
"""

from __future__ import annotations

import codecs
import fnmatch
import gzip
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from shardwright.config.schema import Source
from shardwright.errors import DataError

PIECE_CHARACTERS = 256 * 1024
"""A text file is read in pieces of about this size, so that a file of any size costs the same memory."""

FORMAT_OF_SUFFIX = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
NOT_TEXT = {
    **dict.fromkeys((".xz", ".bz2", ".lz4", ".br"), "decompress it, or compress it with gzip or zstd"),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar"), "unpack it and name the folder"),
    **dict.fromkeys((".json", ".csv", ".tsv"), "convert it to JSON lines, or say `format: text` to learn the file as it stands"),
    **dict.fromkeys((".arrow", ".feather", ".orc", ".avro"), "convert it to Parquet"),
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
    text_field: str


class Piece(NamedTuple):
    """A stretch of one document's text. `record` counts documents and broken records over all files, from 0."""

    text: str
    record: int
    begins: bool
    ends: bool


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
        if path.is_dir():
            files += _list_folder(source, path, where)
        elif path.is_file():
            if source.glob or source.exclude:
                raise DataError("`glob` and `exclude` choose files of a folder; this is a file", field=where, got=source.path)
            files.append(_as_file(source, path, path.name, where))
        else:
            raise DataError("no such file or folder", field=where, got=source.path, remedy=f"Looked from {Path.cwd()}")
    return tuple(files)


def _list_folder(source: Source, folder: Path, where: str) -> list[SourceFile]:
    def stop(error: OSError) -> None:
        raise DataError(f"a folder cannot be listed: {error.strerror}", field=where, got=error.filename)

    files, passed_over = [], set()
    for parent, folders, names in os.walk(folder, onerror=stop):
        relative = Path(parent).relative_to(folder)
        folders[:] = [name for name in folders if not name.startswith(".") and not _excluded(source, relative / name)]
        for name in names:
            below = relative / name
            if name.startswith(".") or _excluded(source, below):
                continue
            if _chosen(source, below):
                files.append(_as_file(source, Path(parent) / name, below.as_posix(), where))
            else:
                passed_over.add(Path(name).suffix or name)
    if not files:
        raise DataError(
            f"no file in this folder matches {source.glob!r}" if source.glob else "no file in this folder has a known format",
            field=where,
            got=source.path,
            allowed=", ".join(FORMAT_OF_SUFFIX) if not source.glob else None,
            remedy=f"It holds {', '.join(sorted(passed_over)[:8])} files: choose with `glob`" if passed_over else "It is empty",
        )
    return sorted(files, key=lambda file: Path(file.name).parts)


def _excluded(source: Source, below: Path) -> bool:
    return any(
        fnmatch.fnmatchcase(below.as_posix(), pattern) or fnmatch.fnmatchcase(below.name, pattern) for pattern in source.exclude
    )


def _chosen(source: Source, below: Path) -> bool:
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
                allowed="text, JSON lines or Parquet, also with .gz or .zst around text and JSON lines",
                remedy=NOT_TEXT[suffix][0].upper() + NOT_TEXT[suffix][1:],
            )
        kind = FORMAT_OF_SUFFIX.get(suffix, "text")
    if kind == "parquet" and around:
        raise DataError("Parquet compresses itself; a compressed file of it is not read", field=where, got=str(path))
    return SourceFile(path, name, kind, COMPRESSIONS.get(around), source.text_field)


def read_files(files: Sequence[SourceFile]) -> Iterator[Piece | Broken]:
    """Every record of the files in order, as pieces of text or as broken.

    Raises:
        DataError: a file that cannot be opened or is damaged as a whole.
    """
    record = 0
    for file in files:
        read = {"text": _read_text, "jsonl": _read_json_lines, "parquet": _read_parquet}[file.format]
        try:
            empty = True
            for item in read(file, record):
                empty, record = False, item.record
                yield item
            if empty:
                yield Broken(record, file.name, 1, "an empty file", harmless=True)
        except (OSError, EOFError, ValueError) as error:  # ValueError: pyarrow's ArrowInvalid is one
            raise DataError(f"cannot be read: {error}", field=str(file.path)) from error
        record += 1


def _open(file: SourceFile) -> IO[bytes]:
    if file.compression == "gzip":
        return cast(IO[bytes], gzip.open(file.path, "rb"))
    if file.compression == "zstd":
        import pyarrow

        return cast(IO[bytes], io.BufferedReader(pyarrow.input_stream(str(file.path), compression="zstd")))
    return open(file.path, "rb")


def _read_text(file: SourceFile, record: int) -> Iterator[Piece | Broken]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    pending: list[str] = []
    num_pending, line, begins, blank = 0, 1, True, True
    with _open(file) as stream:
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


def _read_json_lines(file: SourceFile, record: int) -> Iterator[Piece | Broken]:
    with _open(file) as stream:
        for number, line in enumerate(stream, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.isspace() or not line:
                continue
            text, reason = _text_of_json(line, file.text_field)
            yield Broken(record, file.name, number, reason) if reason else Piece(text, record, True, True)
            record += 1


def _text_of_json(line: bytes, field: str) -> tuple[str, str]:
    """(text, "") or ("", why not)."""
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return "", f"not UTF-8: {error.reason} at byte {error.start}"
    except json.JSONDecodeError as error:
        return "", f"not JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        return "", f"not JSON: {error}"
    if not isinstance(value, dict):
        return "", f"not an object but {type(value).__name__}"
    if field not in value:
        return "", f"no field {field!r}; it has {', '.join(map(repr, list(value)[:6]))}"
    return _checked(value[field], field)


def _checked(text: Any, field: str) -> tuple[str, str]:
    if not isinstance(text, str):
        return "", f"{field!r} is not a string but {'null' if text is None else type(text).__name__}"
    if not text or text.isspace():
        return "", f"{field!r} is empty"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "", f"{field!r} holds half a surrogate pair"
    return text, ""


def _read_parquet(file: SourceFile, record: int) -> Iterator[Piece | Broken]:
    import pyarrow
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file.path) as parquet:
        schema = parquet.schema_arrow
        if file.text_field not in schema.names:
            raise DataError("no such column", field=str(file.path), got=file.text_field, allowed=", ".join(schema.names))
        kind = schema.field(file.text_field).type
        value_kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not (pyarrow.types.is_string(value_kind) or pyarrow.types.is_large_string(value_kind)):
            raise DataError("the column holds no strings", field=str(file.path), got=f"{file.text_field}: {kind}", allowed="string")
        row = 0
        for batch in parquet.iter_batches(batch_size=256, columns=[file.text_field]):
            for value in batch.column(0):
                row += 1
                try:
                    text, reason = _checked(value.as_py(), file.text_field)
                except UnicodeDecodeError as error:
                    text, reason = "", f"not UTF-8: {error.reason}"
                yield Broken(record, file.name, row, reason) if reason else Piece(text, record, True, True)
                record += 1
