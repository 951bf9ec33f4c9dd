"""Where text comes from: files of a recipe's sources, read record by record without ever holding a whole corpus.

A text file is one document; a line of JSON lines or a row of Parquet is one record: a document, a conversation, or another of
the kinds of `formats`. A record that cannot be read is not an exception but a `Broken`, with file and line, so that one bad
line does not stop a corpus of millions.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.config.data import Source
from shardwright.data.formats import KINDS, Records, Unusable, recognise
from shardwright.data.records import (
    MAX_RECORD_BYTES,
    column_types,
    holds_strings,
    open_stream,
    read_rows,
    refuse_utf_16,
)
from shardwright.errors import DataError

PIECE_CHARACTERS = 256 * 1024
"""A text file is read in pieces of about this size, so that a file of any size costs the same memory."""

PIECES_WITHOUT_LINES = 16
"""Text without line ends is cut between words once it is this many pieces long."""
MAX_STRETCH_CHARACTERS = 16 * 1024**2
"""Longest stretch without a place to cut. A tokenizer takes some 200 bytes of memory and a microsecond for each character."""
_TAIL_CHARACTERS = 4096
_SHOWN_CHARACTERS = 300
_LINE_BORDER = re.compile(r"\S\n(?=\S)")
_WORD_BORDER = re.compile(r"\S(?= \S)")
NUM_ROWS_LOOKED_AT = 64
_TEXT_FIELD = Source.model_fields["text_field"].default
COLUMNAR = ("parquet", "arrow")


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
            if num_pending >= PIECE_CHARACTERS and (
                cut := _place_to_cut(pending, between_words=num_pending >= PIECES_WITHOUT_LINES * PIECE_CHARACTERS)
            ):
                yield Piece(cut, record, begins, False)
                num_pending, begins = len(pending[0]), False
            if num_pending > MAX_STRETCH_CHARACTERS:
                raise DataError(
                    "too long a stretch of text without a single line end or space between two words",
                    field=f"{file.path}:{line}",
                    got=f"{num_pending:,} characters and more",
                    allowed=f"{MAX_STRETCH_CHARACTERS:,} characters",
                    remedy="If this is text, break its lines; if it is none, leave the file out",
                )
    if blank:
        yield Broken(record, file.name, 1, "an empty file", harmless=True)
    else:
        yield Piece("".join(pending), record, begins, True)


def _place_to_cut(pending: list[str], *, between_words: bool) -> str:
    """Take from `pending` all text up to its last line end between two other characters.

    Args:
        between_words: without such a line end, up to the last single space between two words.

    There a tokenizer that splits words before it merges is most likely to split too; the caller checks. Returns "" and
    leaves `pending` when there is no such place, which lets the piece grow.
    """
    recent = "".join(pending[-2:])
    end = _last_border(_LINE_BORDER, recent) or (between_words and _last_border(_WORD_BORDER, recent))
    if not end:
        return ""
    head = "".join(pending[:-2]) + recent[:end]
    pending[:] = [recent[end:]]
    return head


def _divide(text: str) -> Iterator[str]:
    """A text in pieces of about the same size, each of which ends where a text file would be cut."""
    size = PIECES_WITHOUT_LINES * PIECE_CHARACTERS
    start = 0
    for at in range(0, len(text) - size, size):
        window = text[at : at + size]
        if end := _last_border(_LINE_BORDER, window) or _last_border(_WORD_BORDER, window):
            yield text[start : at + end]
            start = at + end
    yield text[start:]


def _last_border(pattern: re.Pattern[str], text: str) -> int:
    """Where the last match ends; 0 for none. Looks near the end first, where there nearly always is one."""
    for start in (max(0, len(text) - _TAIL_CHARACTERS), 0):
        end = max((match.end() for match in pattern.finditer(text, start)), default=0)
        if end:
            return end
    return 0


def _read_records(file: SourceFile, record: int) -> Iterator[Piece | Broken]:
    for index, row in enumerate(read_rows(file.path, file.format, file.compression, file.records.column_names())):
        if index == 0 and file.format in COLUMNAR:  # of no rows nobody knows the columns
            _check_columns(file)
        text, reason, canonical = "", row.reason, ""
        if row.value is not None:
            try:
                canonical, text = file.records.read(row.value)
            except Unusable as error:
                reason = str(error)
        parts = [text]
        if len(text) > MAX_RECORD_BYTES:
            reason = f"longer than {MAX_RECORD_BYTES:,} characters"
        elif canonical == "text":
            parts = list(_divide(text))
            if max(map(len, parts)) > MAX_STRETCH_CHARACTERS:
                reason = f"more than {MAX_STRETCH_CHARACTERS:,} characters without a border between two words"
        if reason:
            yield Broken(record, file.name, row.line, _readable(reason))
        else:
            for number, part in enumerate(parts, start=1):
                yield Piece(part, record, number == 1, number == len(parts), canonical, file.name, row.line)
        record += 1


def _readable(reason: str) -> str:
    """A reason of a length to print, without the halves of surrogate pairs that JSON may spell."""
    if len(reason) > _SHOWN_CHARACTERS:
        reason = f"{reason[:_SHOWN_CHARACTERS]}..."
    return reason.encode("utf-8", "backslashreplace").decode("utf-8")


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
