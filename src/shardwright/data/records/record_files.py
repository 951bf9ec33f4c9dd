"""Rows of record files: JSON lines, JSON arrays, Parquet, Arrow (Hugging Face `datasets`).

A row is a JSON-like object, or the reason why it could not be read, with its line number (in
Parquet and Arrow the row number, from 1). Files are streamed: JSON by row, Parquet and Arrow by
batches of rows of the requested columns.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from shardwright.data.records.sample_archives import ARCHIVE_FORMATS, read_archive
from shardwright.errors import DataError
from shardwright.files import open_regular_file

MAX_RECORD_BYTES = 64 * 1024**2
"""Maximum size of a record, in characters of decoded text. A longer line of JSON lines or a
longer record of another format is skipped; a longer element of a JSON array is an error, as is
longer plain text that a tokenizer cannot split."""
_MAX_SKIPPED_CHARACTERS = 1024**3
"""Maximum length of a line that is skipped; a longer one is an error, because it may never
end."""
_CHARACTERS_PER_SKIP = 1 << 20
_MAX_BATCH_BYTES = 256 * 1024**2
_NOT_SPACE = re.compile(r"\S")
_BLOCK_NUM_CHARACTERS = 1 << 18
_ROWS_PER_BATCH = 256


class RecordRow(NamedTuple):
    """One row; `value` is None if it could not be read, and `reason` says why."""

    line: int
    value: dict[str, Any] | None
    reason: str = ""


def read_rows(
    path: Path, file_format: str, compression: str | None, columns: Sequence[str] | None = None
) -> Iterator[RecordRow]:
    """Yield every row of a file of records, in order.

    Args:
        file_format: jsonl, json, parquet, arrow, mds, webdataset or tokens.
        columns: columns to read from a Parquet or Arrow file; missing ones are ignored. None
            reads all.

    Raises:
        DataError: a duplicate column, a file in UTF-16. OSError, EOFError, ValueError: a
            damaged file.
    """
    if file_format in ("jsonl", "json"):
        reject_utf_16(path, compression)
        return (
            _read_json_lines(path, compression)
            if file_format == "jsonl"
            else _read_json(path, compression)
        )
    if file_format in ARCHIVE_FORMATS:
        return (
            RecordRow(number, value, reason)
            for number, (value, reason) in enumerate(read_archive(path, file_format), start=1)
        )
    return _read_columns(path, file_format, columns)


def read_column_types(path: Path, file_format: str) -> dict[str, Any]:
    """Return the columns of a Parquet or Arrow file with their Arrow types."""
    import pyarrow
    import pyarrow.parquet

    if file_format == "parquet":
        schema = pyarrow.parquet.read_schema(path)
    else:
        with pyarrow.memory_map(str(path)) as mapped:
            schema = _open_arrow(mapped)[0]
    return dict(zip(schema.names, schema.types, strict=True))


def is_string_type(arrow_type: Any) -> bool:
    """Return True if an Arrow type is a string, or a dictionary of strings."""
    from pyarrow import types

    value_type = arrow_type.value_type if types.is_dictionary(arrow_type) else arrow_type
    return bool(types.is_string(value_type) or types.is_large_string(value_type))


def open_stream(path: Path, compression: str | None) -> IO[bytes]:
    """Open a file for reading its decompressed bytes.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    stream = open_regular_file(path)
    if compression is None:
        return stream
    stream.close()
    if compression == "gzip":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if compression == "zstd":
        import pyarrow

        return cast(
            IO[bytes], io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
        )
    raise AssertionError(compression)


def reject_utf_16(path: Path, compression: str | None) -> None:
    """Raise if a file starts with a UTF-16 or UTF-32 byte order mark.

    Otherwise every line would be reported as broken, each for another reason.

    Raises:
        DataError: the file is UTF-16 or UTF-32.
    """
    with open_stream(path, compression) as stream:
        start = stream.read(2)
    if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise DataError(
            "the file is UTF-16",
            field=str(path),
            allowed="UTF-8",
            remedy="Save it as UTF-8 (iconv -f UTF-16 -t UTF-8)",
        )


def _read_json_lines(path: Path, compression: str | None) -> Iterator[RecordRow]:
    """Yield the rows of JSON lines; lines end with \\n, \\r\\n or \\r."""
    with io.TextIOWrapper(
        open_stream(path, compression), encoding="utf-8", errors="surrogateescape", newline=None
    ) as lines:
        number = 0
        while line := lines.readline(MAX_RECORD_BYTES + 1):
            number += 1
            if len(line) > MAX_RECORD_BYTES and not line.endswith("\n"):
                _skip_line(lines, path, number)
                yield RecordRow(number, None, f"longer than {MAX_RECORD_BYTES:,} characters")
                continue
            if number == 1:
                line = line.removeprefix("\ufeff")
            if line and not line.isspace():
                yield _parse_line(line, number)


def _skip_line(lines: io.TextIOWrapper, path: Path, number: int) -> None:
    """Read and discard the rest of a line."""
    num_skipped = 0
    while (rest := lines.readline(_CHARACTERS_PER_SKIP)) and not rest.endswith("\n"):
        num_skipped += len(rest)
        if num_skipped > _MAX_SKIPPED_CHARACTERS:
            raise DataError(
                "a line has no end within the limit",
                field=f"{path}:{number}",
                got=f"more than {_MAX_SKIPPED_CHARACTERS:,} characters",
                allowed=f"a record of at most {MAX_RECORD_BYTES:,} characters on each line",
                remedy="If the file has another format, set the source's `format`",
            )


def _parse_line(line: str, number: int) -> RecordRow:
    try:
        if not line.isascii():
            line.encode("utf-8", "surrogateescape").decode("utf-8")
        return _build_row(json.loads(line, object_pairs_hook=_build_object), number)
    except UnicodeDecodeError as error:
        return RecordRow(number, None, f"not UTF-8: {error.reason} at byte {error.start}")
    except json.JSONDecodeError as error:
        problem = error.msg.removesuffix(" at")  # some end with it, for a position that follows
        return RecordRow(number, None, f"not JSON: {problem} at column {error.colno}")
    except _RejectedValue as error:
        return RecordRow(number, None, error.reason)
    except (ValueError, RecursionError) as error:
        return RecordRow(number, None, f"not JSON: {error}")


class _RejectedValue(Exception):
    """Raised for JSON that Python would misread: duplicate keys, very long numbers."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen_keys: set[str] = set()
        for key, _ in pairs:
            if key in seen_keys:
                raise _RejectedValue(f"the field {key!r} occurs twice")
            seen_keys.add(key)
    return fields


def _parse_integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError as error:  # more digits than Python converts
        raise _RejectedValue(f"a number has {len(digits):,} digits") from error


def _build_row(value: Any, number: int) -> RecordRow:
    if isinstance(value, dict):
        return RecordRow(number, value)
    return RecordRow(number, None, f"expected an object, got {type(value).__name__}")


def _read_json(path: Path, compression: str | None) -> Iterator[RecordRow]:
    """Yield the rows of a .json file: a JSON array of objects, else JSON lines."""
    with open_stream(path, compression) as stream:
        window = _TextWindow(codecs.getreader("utf-8-sig")(stream))
        first = window.skip_space()
        if first == "[":
            yield from _read_array(path, window)
        if first in ("[", ""):
            return
    yield from _read_json_lines(path, compression)


def _read_array(path: Path, window: _TextWindow) -> Iterator[RecordRow]:
    """Yield the elements of a JSON array, one at a time."""
    decoder = json.JSONDecoder(object_pairs_hook=_build_object, parse_int=_parse_integer)
    lenient = json.JSONDecoder(parse_int=float)
    window.advance(1)  # the bracket
    while True:
        next_character = window.skip_space()
        if next_character == "]":
            return
        if next_character == ",":
            window.advance(1)
            continue
        line = window.line
        if not next_character:
            yield RecordRow(line, None, "the file ends inside the array: it is truncated")
            return
        reason_refused = ""
        while True:
            try:
                value, end = (lenient if reason_refused else decoder).raw_decode(
                    window.text, window.position
                )
                if end == len(window.text) and not isinstance(value, dict) and window.read_more():
                    continue  # the number may continue
                break
            except _RejectedValue as error:
                # decode again without the check, to find the end of the record
                reason_refused = error.reason
            except (json.JSONDecodeError, RecursionError) as error:
                num_unparsed = len(window.text) - window.position
                if num_unparsed > MAX_RECORD_BYTES or isinstance(error, RecursionError):
                    reason = str(error)
                    if num_unparsed > MAX_RECORD_BYTES:
                        reason = f"longer than {MAX_RECORD_BYTES:,} characters"
                    raise DataError(
                        f"a record cannot be read: {reason}", field=f"{path}:{line}"
                    ) from error
                if window.read_more():
                    continue
                if getattr(error, "pos", 0) < len(
                    window.text.rstrip()
                ) and "Unterminated" not in str(error):
                    raise DataError(
                        f"not JSON: {error}; the rest of the file cannot be read",
                        field=f"{path}:{line}",
                    ) from error
                yield RecordRow(line, None, "the file ends inside a record: it is truncated")
                return
        yield RecordRow(line, None, reason_refused) if reason_refused else _build_row(value, line)
        window.advance(end - window.position)


class _TextWindow:
    """Buffer over a text stream, with a position in it and the line number of that position."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.text = ""
        self.position = 0
        self.line = 1

    def advance(self, count: int) -> None:
        """Advance the position by `count` characters."""
        self.line += self.text.count("\n", self.position, self.position + count)
        self.position += count
        # With this threshold each character is copied about once.
        if self.position > max(_BLOCK_NUM_CHARACTERS, len(self.text) // 2):
            self.text = self.text[self.position :]
            self.position = 0

    def read_more(self) -> bool:
        """Double the unread text, so that few parses suffice; return False at the end."""
        more = self._reader.read(max(_BLOCK_NUM_CHARACTERS, len(self.text) - self.position))
        self.text += more
        return bool(more)

    def skip_space(self) -> str:
        """Skip white space; return the next character, or "" at the end."""
        while True:
            if match := _NOT_SPACE.search(self.text, self.position):
                self.advance(match.start() - self.position)
                return match[0]
            self.advance(len(self.text) - self.position)
            if not self.read_more():
                return ""


def _read_columns(
    path: Path, file_format: str, columns: Sequence[str] | None
) -> Iterator[RecordRow]:
    import pyarrow
    import pyarrow.parquet

    if file_format == "parquet":
        with pyarrow.parquet.ParquetFile(path) as parquet:
            chosen = _choose_columns(path, parquet.schema_arrow.names, columns)
            yield from _iterate_rows(
                parquet.iter_batches(batch_size=_ROWS_PER_BATCH, columns=chosen)
            )
        return
    with pyarrow.memory_map(str(path)) as mapped:
        schema, batches = _open_arrow(mapped)
        chosen = _choose_columns(path, schema.names, columns)
        small = (
            batch.slice(at, _ROWS_PER_BATCH)
            for batch in batches
            for at in range(0, batch.num_rows, _ROWS_PER_BATCH)
        )
        yield from _iterate_rows(batch.select(chosen) for batch in small)


def _open_arrow(mapped: Any) -> tuple[Any, Iterator[Any]]:
    """Return schema and batches of an Arrow stream (written by `datasets`) or an Arrow file."""
    import pyarrow

    try:
        reader = pyarrow.ipc.open_stream(mapped)
    except pyarrow.ArrowInvalid:
        mapped.seek(0)
        file = pyarrow.ipc.open_file(mapped)
        return file.schema, (file.get_batch(number) for number in range(file.num_record_batches))
    return reader.schema, iter(reader)


def _choose_columns(path: Path, names: list[str], columns: Sequence[str] | None) -> list[str]:
    chosen = [name for name in dict.fromkeys(names) if columns is None or name in columns]
    for name in chosen:
        if names.count(name) > 1:
            raise DataError(
                "two columns have the same name",
                field=str(path),
                got=name,
                remedy="Rename one of them",
            )
    return chosen


def _iterate_rows(batches: Iterator[Any]) -> Iterator[RecordRow]:
    number = 0
    for batch in batches:
        for value in _read_batch_rows(batch):
            number += 1
            yield (
                RecordRow(number, None, value)
                if isinstance(value, str)
                else RecordRow(number, value)
            )


def _read_batch_rows(batch: Any) -> Iterable[dict[str, Any] | str]:
    """Return the rows of a batch, or the reason why one is broken; large batches row by row."""
    if batch.nbytes <= _MAX_BATCH_BYTES:
        try:
            return cast(list[dict[str, Any] | str], list(map(_drop_absent, batch.to_pylist())))
        except UnicodeDecodeError:
            pass
    return (_read_single_row(batch, index) for index in range(batch.num_rows))


def _read_single_row(batch: Any, index: int) -> dict[str, Any] | str:
    try:
        return _drop_absent(batch.slice(index, 1).to_pylist()[0])
    except UnicodeDecodeError as error:
        return f"not UTF-8: {error.reason}"


def _drop_absent(row: dict[str, Any]) -> dict[str, Any]:
    """Drop the null fields inside a row's columns.

    A column of objects has every field of any of them: a list of tools would have the parameters
    of all tools of the file, as null, and a chat template would render them.
    """
    return {name: _drop_nulls(value) for name, value in row.items()}


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value[:2]):
        return [_drop_nulls(item) for item in value]
    return value
