"""Rows of files that hold records: JSON lines, JSON arrays, Parquet, and the Arrow files of Hugging Face `datasets`.

A row is a JSON-like object, or says why it is none, with its line (in Parquet and Arrow: its row, from 1). Files are streamed:
of JSON a row at a time, of Parquet and Arrow a batch of rows of the columns that are asked for.
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

from shardwright.errors import DataError
from shardwright.files import open_regular

MAX_RECORD_BYTES = 64 * 1024**2
"""A longer line of JSON lines or text of another record is set aside; a longer element of a JSON array is an error, as is a
stretch of plain text without two words. Counted in characters where text is held."""
_MAX_SKIPPED_CHARACTERS = 1024**3
"""A line that goes on for longer than this is an error: what follows may never come."""
_SKIPPED_AT_A_TIME = 1 << 20
_MAX_BATCH_BYTES = 256 * 1024**2
_NOT_SPACE = re.compile(r"\S")
_BLOCK_CHARACTERS = 1 << 18
_ROWS_AT_A_TIME = 256


class Row(NamedTuple):
    """`value` is an object, or None where `reason` says why there is none."""

    line: int
    value: dict[str, Any] | None
    reason: str = ""


def read_rows(path: Path, form: str, compression: str | None, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Every row of a file of records, in order.

    Args:
        form: jsonl, json, parquet or arrow.
        columns: of a Parquet or Arrow file, which are read; those that it lacks are passed over. None reads all.

    Raises:
        DataError: a column that is there twice, a file in UTF-16.
        OSError, EOFError, ValueError: a file that is damaged as a whole.
    """
    if form in ("jsonl", "json"):
        refuse_utf_16(path, compression)
        return _read_json_lines(path, compression) if form == "jsonl" else _read_json(path, compression)
    return _read_columns(path, form, columns)


def column_types(path: Path, form: str) -> dict[str, Any]:
    """The columns of a Parquet or Arrow file with their Arrow types."""
    import pyarrow
    import pyarrow.parquet

    if form == "parquet":
        schema = pyarrow.parquet.read_schema(path)
    else:
        with pyarrow.memory_map(str(path)) as mapped:
            schema = _open_arrow(mapped)[0]
    return dict(zip(schema.names, schema.types, strict=True))


def holds_strings(kind: Any) -> bool:
    """Whether an Arrow type is text, also by a dictionary."""
    from pyarrow import types

    value_kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(value_kind) or types.is_large_string(value_kind))


def open_stream(path: Path, compression: str | None) -> IO[bytes]:
    """The bytes of a file, decompressed.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    plain = open_regular(path)
    if compression is None:
        return plain
    plain.close()
    if compression == "gzip":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if compression == "zstd":
        import pyarrow

        return cast(IO[bytes], io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd")))
    raise AssertionError(compression)


def refuse_utf_16(path: Path, compression: str | None) -> None:
    """Refuse a file whose first bytes say that it is UTF-16 or UTF-32: of its lines none could be read, each for another reason.

    Raises:
        DataError: names the file.
    """
    with open_stream(path, compression) as stream:
        start = stream.read(2)
    if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise DataError(
            "the file is UTF-16", field=str(path), allowed="UTF-8", remedy="Save it as UTF-8 (iconv -f UTF-16 -t UTF-8)"
        )


def _read_json_lines(path: Path, compression: str | None) -> Iterator[Row]:
    """Lines end with \\n, \\r\\n or \\r, none of which JSON has within a string."""
    with io.TextIOWrapper(open_stream(path, compression), encoding="utf-8", errors="surrogateescape", newline=None) as lines:
        number = 0
        while line := lines.readline(MAX_RECORD_BYTES + 1):
            number += 1
            if len(line) > MAX_RECORD_BYTES and not line.endswith("\n"):
                _skip_line(lines, path, number)
                yield Row(number, None, f"longer than {MAX_RECORD_BYTES:,} characters")
                continue
            if number == 1:
                line = line.removeprefix("\ufeff")
            if line and not line.isspace():
                yield _parse(line, number)


def _skip_line(lines: io.TextIOWrapper, path: Path, number: int) -> None:
    """Read the rest of a line."""
    num_skipped = 0
    while (rest := lines.readline(_SKIPPED_AT_A_TIME)) and not rest.endswith("\n"):
        num_skipped += len(rest)
        if num_skipped > _MAX_SKIPPED_CHARACTERS:
            raise DataError(
                "a line without an end",
                field=f"{path}:{number}",
                got=f"more than {_MAX_SKIPPED_CHARACTERS:,} characters",
                allowed=f"a record of at most {MAX_RECORD_BYTES:,} characters on each line",
                remedy="If the file is of another form, say so in the source's `format`",
            )


def _parse(line: str, number: int) -> Row:
    try:
        if not line.isascii():
            line.encode("utf-8", "surrogateescape").decode("utf-8")
        return _as_row(json.loads(line, object_pairs_hook=_object), number)
    except UnicodeDecodeError as error:
        return Row(number, None, f"not UTF-8: {error.reason} at byte {error.start}")
    except json.JSONDecodeError as error:
        return Row(number, None, f"not JSON: {error.msg} at column {error.colno}")
    except _Refused as error:
        return Row(number, None, error.reason)
    except (ValueError, RecursionError) as error:
        return Row(number, None, f"not JSON: {error}")


class _Refused(Exception):
    """JSON that Python would read otherwise than it is meant: of a key that an object has twice it would keep the last."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Refused(f"the field {key!r} is there twice")
            seen.add(key)
    return found


def _integer(digits: str) -> int:
    try:
        return int(digits)
    except ValueError as error:  # more digits than Python converts
        raise _Refused(f"a number of {len(digits):,} digits") from error


def _as_row(value: Any, number: int) -> Row:
    if isinstance(value, dict):
        return Row(number, value)
    return Row(number, None, f"not an object but {type(value).__name__}")


def _read_json(path: Path, compression: str | None) -> Iterator[Row]:
    """A .json file: an array of objects, or in truth JSON lines, told apart by the first character."""
    with open_stream(path, compression) as stream:
        window = _Window(codecs.getreader("utf-8-sig")(stream))
        first = window.skip()
        if first == "[":
            yield from _read_array(path, window)
        if first in ("[", ""):
            return
    yield from _read_json_lines(path, compression)


def _read_array(path: Path, window: _Window) -> Iterator[Row]:
    """The elements of an array, one at a time."""
    decoder = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer)
    lenient = json.JSONDecoder(parse_int=float)
    window.take(1)  # the bracket
    while True:
        following = window.skip()
        if following == "]":
            return
        if following == ",":
            window.take(1)
            continue
        line = window.line
        if not following:
            yield Row(line, None, "the file ends within the array: it is cut short")
            return
        refused = ""
        while True:
            try:
                value, end = (lenient if refused else decoder).raw_decode(window.text, window.at)
                if end == len(window.text) and not isinstance(value, dict) and window.grow():
                    continue  # a number may go on
                break
            except _Refused as error:  # told only once the record is whole: its end is where it is without the check
                refused = error.reason
            except (json.JSONDecodeError, RecursionError) as error:
                held = len(window.text) - window.at
                if held > MAX_RECORD_BYTES or isinstance(error, RecursionError):
                    reason = f"longer than {MAX_RECORD_BYTES:,} characters" if held > MAX_RECORD_BYTES else str(error)
                    raise DataError(f"a record cannot be read: {reason}", field=f"{path}:{line}") from error
                if window.grow():
                    continue
                if getattr(error, "pos", 0) < len(window.text.rstrip()) and "Unterminated" not in str(error):
                    raise DataError(f"not JSON: {error}; nothing behind it can be read", field=f"{path}:{line}") from error
                yield Row(line, None, "the file ends within a record: it is cut short")
                return
        yield Row(line, None, refused) if refused else _as_row(value, line)
        window.take(end - window.at)


class _Window:
    """The part of a text that is being read, and the line where it stands."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.text, self.at, self.line = "", 0, 1

    def take(self, count: int) -> None:
        """Pass over characters."""
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count
        if self.at > max(_BLOCK_CHARACTERS, len(self.text) // 2):  # so that each character is moved about once
            self.text, self.at = self.text[self.at :], 0

    def grow(self) -> bool:
        """Read more: as much again as is held, so that a long record is parsed a few times only."""
        more = self._reader.read(max(_BLOCK_CHARACTERS, len(self.text) - self.at))
        self.text += more
        return bool(more)

    def skip(self) -> str:
        """Pass over white space; the character that follows, or nothing at the end."""
        while True:
            if found := _NOT_SPACE.search(self.text, self.at):
                self.take(found.start() - self.at)
                return found[0]
            self.take(len(self.text) - self.at)
            if not self.grow():
                return ""


def _read_columns(path: Path, form: str, columns: Sequence[str] | None) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    if form == "parquet":
        with pyarrow.parquet.ParquetFile(path) as parquet:
            chosen = _choose(path, parquet.schema_arrow.names, columns)
            yield from _rows_of(parquet.iter_batches(batch_size=_ROWS_AT_A_TIME, columns=chosen))
        return
    with pyarrow.memory_map(str(path)) as mapped:
        schema, batches = _open_arrow(mapped)
        chosen = _choose(path, schema.names, columns)
        small = (batch.slice(at, _ROWS_AT_A_TIME) for batch in batches for at in range(0, batch.num_rows, _ROWS_AT_A_TIME))
        yield from _rows_of(batch.select(chosen) for batch in small)


def _open_arrow(mapped: Any) -> tuple[Any, Iterator[Any]]:
    """Schema and batches of either form of Arrow file: the stream that `datasets` writes, or the file."""
    import pyarrow

    try:
        reader = pyarrow.ipc.open_stream(mapped)
    except pyarrow.ArrowInvalid:
        mapped.seek(0)
        file = pyarrow.ipc.open_file(mapped)
        return file.schema, (file.get_batch(number) for number in range(file.num_record_batches))
    return reader.schema, iter(reader)


def _choose(path: Path, names: list[str], columns: Sequence[str] | None) -> list[str]:
    wanted = [name for name in dict.fromkeys(names) if columns is None or name in columns]
    for name in wanted:
        if names.count(name) > 1:
            raise DataError("a column is there twice", field=str(path), got=name, remedy="Name the columns apart")
    return wanted


def _rows_of(batches: Iterator[Any]) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for value in _values_of(batch):
            number += 1
            yield Row(number, None, value) if isinstance(value, str) else Row(number, value)


def _values_of(batch: Any) -> Iterable[dict[str, Any] | str]:
    """The rows of a batch, or why one is none. Rows of large texts are made one at a time."""
    if batch.nbytes <= _MAX_BATCH_BYTES:
        try:
            return cast(list[dict[str, Any] | str], batch.to_pylist())
        except UnicodeDecodeError:
            pass
    return (_row_alone(batch, index) for index in range(batch.num_rows))


def _row_alone(batch: Any, index: int) -> dict[str, Any] | str:
    try:
        return cast(dict[str, Any], batch.slice(index, 1).to_pylist()[0])
    except UnicodeDecodeError as error:
        return f"not UTF-8: {error.reason}"
