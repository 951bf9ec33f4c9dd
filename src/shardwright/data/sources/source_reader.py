"""Streaming reader of a recipe's source files, record by record.

A text file is one document; a line of JSON lines or a row of Parquet is one record: a document,
a conversation, or another kind of `formats`. A record that cannot be read does not raise; it
yields a `BrokenRecord` with file and line, so that one bad line does not stop a corpus of millions.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.config.data import DataSource
from shardwright.data.records.record_files import (
    MAX_RECORD_BYTES,
    is_string_type,
    open_stream,
    read_column_types,
    read_rows,
    reject_utf_16,
)
from shardwright.data.records.record_formats import (
    RECORD_KINDS,
    RecordSchema,
    UnusableRecord,
    detect_schema,
)
from shardwright.errors import DataError

PIECE_NUM_CHARACTERS = 256 * 1024
"""Approximate size of the pieces in which a text file is read, so that memory use is
bounded."""

PIECES_WITHOUT_LINES = 16
"""Number of pieces after which text without line ends is split between words."""
MAX_UNSPLIT_CHARACTERS = 16 * 1024**2
"""Maximum text without a place to split it. Tokenizers need about 200 bytes and 1 us per
character."""
_TAIL_CHARACTERS = 4096
_MAX_SHOWN_CHARACTERS = 300
_LINE_BOUNDARY = re.compile(r"\S\n(?=\S)")
_WORD_BOUNDARY = re.compile(r"\S(?= \S)")
NUM_SAMPLED_ROWS = 64
_DEFAULT_TEXT_FIELD = DataSource.model_fields["text_field"].default
COLUMNAR_FORMATS = ("parquet", "arrow")


@dataclass(frozen=True)
class SourceFile:
    """One file: its path, its name relative to the source's path, and how to read it."""

    path: Path
    name: str
    format: str
    compression: str | None
    records: RecordSchema
    source_index: int = 0
    """Index of the source in the recipe's list."""


class TextPiece(NamedTuple):
    """Part of a document's text. `record` counts all records of all files from 0.

    `canonical` is the canonical form (see `formats`). A piece of any form but `text` is a whole
    record, and `file` and `line` are its location.
    """

    text: str
    record: int
    is_document_start: bool
    is_document_end: bool
    canonical: str = "text"
    file: str = ""
    line: int = 0
    source_index: int = 0


class BrokenRecord(NamedTuple):
    """Record that is skipped. Pieces of it were yielded before, if invalid UTF-8 is found late.

    `harmless` is True for an empty file, which has no text to lose.
    """

    record: int
    file: str
    line: int
    reason: str
    harmless: bool = False


def detect_schemas(
    files: Sequence[SourceFile],
    sources: Sequence[DataSource],
    field: str,
    read_first: Callable[[list[SourceFile]], list[dict[str, Any]]] | None = None,
) -> tuple[SourceFile, ...]:
    """Return the files with the record schema detected from the first records of each source.

    Args:
        read_first: returns the first readable records of files; default `read_first_rows`.

    Raises:
        DataError: records that match several kinds, columns of the recipe that do not exist, a
            file that cannot be read, text files among files of records such as conversations.
    """
    result: list[SourceFile] = []
    for number, source in enumerate(sources):
        source_files = [file for file in files if file.source_index == number]
        record_files = [file for file in source_files if file.format != "text"]
        where = f"{field}.{number}"
        if not record_files and (source.columns or source.records not in ("auto", "text")):
            raise DataError(
                "text files have no records",
                field=f"{where}.records",
                got=source.records,
                allowed="text or auto",
            )
        rows = (read_first or read_first_rows)(record_files)
        requested_kind = (
            "text"
            if source.records == "auto" and source.text_field != _DEFAULT_TEXT_FIELD
            else source.records
        )
        records = detect_schema(rows, requested_kind, source.columns, source.text_field, where)
        texts = [file for file in source_files if file.format == "text"]
        if records.kind != "text" and source.format == "auto" and texts:
            raise DataError(
                "the source contains text files besides files of "
                f"{RECORD_KINDS[records.kind].summary}",
                field=f"{where}.path",
                got=", ".join(file.name for file in texts[:4])
                + (f" and {len(texts) - 4} more" if len(texts) > 4 else ""),
                remedy=f"Skip them (`exclude: [{texts[0].name!r}]`) or add a source for them",
            )
        result += [
            file if file.format == "text" else replace(file, records=records)
            for file in source_files
        ]
    return tuple(result)


def read_first_rows(files: Sequence[SourceFile]) -> list[dict[str, Any]]:
    """Return the first readable records, enough to see columns that are often empty.

    Raises:
        DataError: a file that cannot be read.
    """
    rows: list[dict[str, Any]] = []
    for file in files:
        try:
            for row in read_rows(file.path, file.format, file.compression):
                if row.value is not None:
                    rows.append(row.value)
                if len(rows) == NUM_SAMPLED_ROWS:
                    return rows
        except (OSError, EOFError, ValueError) as error:
            raise DataError(f"cannot be read: {error}", field=str(file.path)) from error
        if rows:
            return rows
    return rows


def read_files(files: Sequence[SourceFile]) -> Iterator[TextPiece | BrokenRecord]:
    """Yield every record of the files in order, as pieces of text or as a broken record.

    Raises:
        DataError: a file that cannot be opened or is damaged, a missing column, or an
            unsupported format.
    """
    record = 0
    for file in files:
        read = _read_text if file.format == "text" else _read_records
        try:
            is_empty = True
            for item in read(file, record):
                is_empty = False
                record = item.record
                yield (
                    item._replace(source_index=file.source_index)
                    if isinstance(item, TextPiece) and file.source_index
                    else item
                )
            if is_empty:
                yield BrokenRecord(record, file.name, 1, "an empty file", harmless=True)
        except (OSError, EOFError, ValueError) as error:
            # ValueError: pyarrow's ArrowInvalid is one
            raise DataError(f"cannot be read: {error}", field=str(file.path)) from error
        record += 1


def _read_text(file: SourceFile, record: int) -> Iterator[TextPiece | BrokenRecord]:
    reject_utf_16(file.path, file.compression)
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    pending: list[str] = []
    num_pending = 0
    line = 1
    begins = is_blank = True
    with open_stream(file.path, file.compression) as stream:
        while True:
            block = stream.read(PIECE_NUM_CHARACTERS)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line += bytes(error.object)[: error.start].count(b"\n")
                yield BrokenRecord(record, file.name, line, f"not UTF-8: {error.reason}")
                return
            line += text.count("\n")
            is_blank = is_blank and not text.strip()
            pending.append(text)
            num_pending += len(text)
            if not block:
                break
            if num_pending >= PIECE_NUM_CHARACTERS and (
                head := _pop_up_to_split(
                    pending,
                    between_words=num_pending >= PIECES_WITHOUT_LINES * PIECE_NUM_CHARACTERS,
                )
            ):
                yield TextPiece(head, record, begins, False)
                num_pending = len(pending[0])
                begins = False
            if num_pending > MAX_UNSPLIT_CHARACTERS:
                raise DataError(
                    "the text has no line end or space within the limit",
                    field=f"{file.path}:{line}",
                    got=f"at least {num_pending:,} characters",
                    allowed=f"{MAX_UNSPLIT_CHARACTERS:,} characters",
                    remedy="If this is text, add line breaks; otherwise remove the file",
                )
    if is_blank:
        yield BrokenRecord(record, file.name, 1, "an empty file", harmless=True)
    else:
        yield TextPiece("".join(pending), record, begins, True)


def _pop_up_to_split(pending_texts: list[str], *, between_words: bool) -> str:
    """Remove and return the text of `pending_texts` up to its last line end between other
    characters.

    Tokenizers that split words before merging are most likely to split there too; the caller
    checks. Without such a place, return "" and leave `pending_texts` unchanged, so that the piece
    grows.

    Args:
        between_words: if there is no such line end, split at the last single space between
            words.
    """
    recent = "".join(pending_texts[-2:])
    end = _find_last_boundary(_LINE_BOUNDARY, recent) or (
        between_words and _find_last_boundary(_WORD_BOUNDARY, recent)
    )
    if not end:
        return ""
    head = "".join(pending_texts[:-2]) + recent[:end]
    pending_texts[:] = [recent[end:]]
    return head


def _split_text(text: str) -> Iterator[str]:
    """Split a text into pieces of similar size, at the same places as a text file."""
    size = PIECES_WITHOUT_LINES * PIECE_NUM_CHARACTERS
    start = 0
    for position in range(0, len(text) - size, size):
        window = text[position : position + size]
        if end := _find_last_boundary(_LINE_BOUNDARY, window) or _find_last_boundary(
            _WORD_BOUNDARY, window
        ):
            yield text[start : position + end]
            start = position + end
    yield text[start:]


def _find_last_boundary(pattern: re.Pattern[str], text: str) -> int:
    """Return the end of the last match, or 0; searches the tail first, for speed."""
    for start in (max(0, len(text) - _TAIL_CHARACTERS), 0):
        end = max((match.end() for match in pattern.finditer(text, start)), default=0)
        if end:
            return end
    return 0


def _read_records(file: SourceFile, record: int) -> Iterator[TextPiece | BrokenRecord]:
    for index, row in enumerate(
        read_rows(file.path, file.format, file.compression, file.records.list_columns())
    ):
        if (
            index == 0 and file.format in COLUMNAR_FORMATS
        ):  # a file without rows may lack the columns
            _check_columns(file)
        text = canonical = ""
        reason = row.reason
        if row.value is not None:
            try:
                canonical, text = file.records.read_row(row.value)
            except UnusableRecord as error:
                reason = str(error)
        parts = [text]
        if len(text) > MAX_RECORD_BYTES:
            reason = f"longer than {MAX_RECORD_BYTES:,} characters"
        elif canonical == "text":
            parts = list(_split_text(text))
            if max(map(len, parts)) > MAX_UNSPLIT_CHARACTERS:
                reason = f"{MAX_UNSPLIT_CHARACTERS:,} characters without a space or line end"
        if reason:
            yield BrokenRecord(record, file.name, row.line, _format_reason(reason))
        else:
            for number, part in enumerate(parts, start=1):
                yield TextPiece(
                    part, record, number == 1, number == len(parts), canonical, file.name, row.line
                )
        record += 1


def _format_reason(reason: str) -> str:
    """Shorten a reason for printing and escape unpaired surrogates, which JSON may contain."""
    if len(reason) > _MAX_SHOWN_CHARACTERS:
        reason = f"{reason[:_MAX_SHOWN_CHARACTERS]}..."
    return reason.encode("utf-8", "backslashreplace").decode("utf-8")


def _check_columns(file: SourceFile) -> None:
    """Raise for a missing or mistyped column, which in a typed file affects all records."""
    column_type_by_name = read_column_types(file.path, file.format)
    required = set(RECORD_KINDS[file.records.kind].required)
    for role, name in file.records.columns:
        if role not in required:
            continue
        if name not in column_type_by_name:
            raise DataError(
                "no such column",
                field=str(file.path),
                got=name,
                allowed=", ".join(column_type_by_name),
            )
        if file.records.kind == "text" and not is_string_type(column_type_by_name[name]):
            raise DataError(
                "the column must contain strings",
                field=str(file.path),
                got=f"{name}: {column_type_by_name[name]}",
                allowed="string",
            )
