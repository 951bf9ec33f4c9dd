"""Records from files: formats, folders, and broken records by file and line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from shardwright.config.data import DataSource
from shardwright.data.sources import source_reader
from shardwright.data.sources.file_listing import list_files
from shardwright.data.sources.source_reader import BrokenRecord, TextPiece, read_files
from shardwright.errors import DataError
from tests.unit.data.recipes import write_json_lines, write_text


def read_sources(*data_sources: DataSource) -> list[TextPiece | BrokenRecord]:
    return list(read_files(list_files(data_sources, "data.sources")))


def list_texts(*data_sources: DataSource) -> list[str]:
    """List the documents, joining the pieces of each."""
    text_by_record: dict[int, str] = {}
    for item in read_sources(*data_sources):
        assert isinstance(item, TextPiece), item
        text_by_record[item.record] = text_by_record.get(item.record, "") + item.text
    return list(text_by_record.values())


def list_broken_records(*data_sources: DataSource) -> list[tuple[str, int, str]]:
    return [
        (item.file, item.line, item.reason)
        for item in read_sources(*data_sources)
        if isinstance(item, BrokenRecord)
    ]


def list_names(files: Sequence[source_reader.SourceFile]) -> list[str]:
    return [file.name for file in files]


def test_a_text_file_is_one_document_byte_for_byte(tmp_path: Path) -> None:
    text = "Größe\r\n\n\ttab \N{GRINNING FACE}\nno end of line"
    assert list_texts(DataSource(path=write_text(tmp_path / "a.txt", text))) == [text]


def test_a_byte_order_mark_is_removed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "hello"}\n')
    assert list_texts(
        DataSource(path=str(tmp_path / "a.txt")), DataSource(path=str(tmp_path / "a.jsonl"))
    ) == ["hello", "hello"]


@pytest.mark.parametrize("ending", ["\n", "\n\n", " \n ", ""])
def test_the_pieces_of_a_large_file_join_to_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(source_reader, "PIECE_NUM_CHARACTERS", 64)
    text = ending.join(f"line {number} é" for number in range(200))
    pieces = read_sources(DataSource(path=write_text(tmp_path / "a.txt", text)))
    assert all(isinstance(piece, TextPiece) for piece in pieces)
    assert "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)) == text
    assert [piece.is_document_start for piece in pieces if isinstance(piece, TextPiece)] == [
        True
    ] + [False] * (len(pieces) - 1)
    assert [piece.is_document_end for piece in pieces if isinstance(piece, TextPiece)] == [
        False
    ] * (len(pieces) - 1) + [True]
    if ending == "\n":
        assert max(len(piece.text) for piece in pieces if isinstance(piece, TextPiece)) < 3 * 64
        assert all(
            piece.text.endswith("é\n") for piece in pieces[:-1] if isinstance(piece, TextPiece)
        )
    else:  # no single line end between two characters: larger pieces, split between words
        assert (
            min(len(piece.text) for piece in pieces[:-1] if isinstance(piece, TextPiece)) > 15 * 64
        )
        assert all(
            piece.text.startswith(" ") for piece in pieces[1:] if isinstance(piece, TextPiece)
        )


def test_json_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text": "one"}\n\n{"text": "two\\nlines", "other": 1}\n   \n{"text": "three"}'
    )
    assert list_texts(DataSource(path=str(path))) == ["one", "two\nlines", "three"]


def test_text_is_read_from_the_configured_field(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "a.ndjson", ["one", "two"], field="body")
    assert list_texts(DataSource(path=path, text_field="body")) == ["one", "two"]


def test_broken_lines_are_reported_by_file_and_line(tmp_path: Path) -> None:
    lines = [
        b'{"text": "good"}',
        b'{"text": "no end',
        b'["a list"]',
        b'{"txt": "misspelt"}',
        b'{"text": 5}',
        b'{"text": null}',
        b'{"text": "  "}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
        b'{"text": "good"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    broken = list_broken_records(DataSource(path=str(tmp_path / "a.jsonl")))
    assert [(file, line) for file, line, _ in broken] == [
        ("a.jsonl", line) for line in range(2, 11)
    ]
    for (_, _, reason), word in zip(
        broken,
        ["not JSON", "list", "'txt'", "int", "null", "empty", "not UTF-8", "surrogate", "not JSON"],
        strict=True,
    ):
        assert word in reason, reason
    assert [
        item.record for item in read_sources(DataSource(path=str(tmp_path / "a.jsonl")))
    ] == list(range(11))


def test_a_text_file_that_is_not_utf8_is_one_broken_record(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nthr\xe9e\nfour\n")
    (tmp_path / "b.txt").write_bytes(b"truncated \xc3")
    assert [
        (file, line) for file, line, _ in list_broken_records(DataSource(path=str(tmp_path)))
    ] == [
        ("a.txt", 3),
        ("b.txt", 1),
    ]


def test_an_error_late_in_a_large_file_has_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_reader, "PIECE_NUM_CHARACTERS", 64)
    (tmp_path / "a.txt").write_bytes(b"a line\n" * 500 + b"\xff\n")
    *pieces, last = read_sources(DataSource(path=str(tmp_path / "a.txt")))
    assert isinstance(last, BrokenRecord)
    assert last.line == 501
    assert len(pieces) > 10
    assert {piece.record for piece in pieces} == {last.record}


@pytest.mark.parametrize("content", ["", " \n\t\n"])
def test_empty_files_are_harmless(tmp_path: Path, content: str) -> None:
    write_text(tmp_path / "a.txt", content)
    write_text(tmp_path / "b.jsonl", content)
    items = read_sources(DataSource(path=str(tmp_path)))
    assert [(item.file, item.harmless) for item in items if isinstance(item, BrokenRecord)] == [
        ("a.txt", True),
        ("b.jsonl", True),
    ]
    assert [item.record for item in items] == [0, 1]


def test_parquet_is_read_in_row_groups(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["one", None, "", "four"] * 300, "number": range(1200)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    items = read_sources(DataSource(path=str(tmp_path / "a.parquet")))
    assert [item.text for item in items if isinstance(item, TextPiece)] == ["one", "four"] * 300
    assert [item.line for item in items if isinstance(item, BrokenRecord)][:4] == [2, 3, 6, 7]


def test_parquet_with_dictionary_encoding_is_read(tmp_path: Path) -> None:
    column = pyarrow.array(["one", "two", "one"]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert list_texts(DataSource(path=str(tmp_path / "a.parquet"))) == ["one", "two", "one"]


@pytest.mark.parametrize(
    ("field", "word"), [("body", "no such column"), ("number", "must contain strings")]
)
def test_parquet_without_a_text_column_is_refused(tmp_path: Path, field: str, word: str) -> None:
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["one"], "number": [1]}), tmp_path / "a.parquet"
    )
    with pytest.raises(DataError, match=word):
        read_sources(DataSource(path=str(tmp_path / "a.parquet"), text_field=field))


def test_compressed_files_are_read(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.txt.gz", "wt") as stream:
        stream.write("gzip")
    with pyarrow.output_stream(tmp_path / "b.jsonl.zst", compression="zstd") as stream:
        stream.write(b'{"text": "zstd 1"}\n{"text": "zstd 2"}\n')
    assert list_texts(DataSource(path=str(tmp_path))) == ["gzip", "zstd 1", "zstd 2"]


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst", "a.parquet"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"content of another format")
    with pytest.raises(DataError, match=name):
        read_sources(DataSource(path=str(tmp_path / name)))


def test_folders_are_read_in_name_order(tmp_path: Path) -> None:
    for name in [
        "b.txt",
        "a/z.txt",
        "a/b/c.txt",
        "c.jsonl",
        ".hidden.txt",
        ".git/x.txt",
        "picture.png",
    ]:
        write_text(tmp_path / name, json.dumps({"text": name}))
    assert list_names(list_files([DataSource(path=str(tmp_path))], "data.sources")) == [
        "a/b/c.txt",
        "a/z.txt",
        "b.txt",
        "c.jsonl",
    ]


@pytest.mark.parametrize(
    ("glob", "exclude", "expected"),
    [
        ("*.py", (), ["a.py", "lib/b.py", "lib/test/c.py", "test_d.py"]),
        ("*.py", ("test*",), ["a.py", "lib/b.py"]),
        ("*.py", ("lib/test",), ["a.py", "lib/b.py", "test_d.py"]),
        ("lib/*", (), ["lib/b.py", "lib/test/c.py"]),
        ("*.py", ("lib",), ["a.py", "test_d.py"]),
    ],
)
def test_glob_and_exclude_select_files(
    tmp_path: Path, glob: str, exclude: tuple[str, ...], expected: list[str]
) -> None:
    for name in ["a.py", "lib/b.py", "lib/test/c.py", "test_d.py", "e.txt"]:
        write_text(tmp_path / name, "x")
    assert (
        list_names(
            list_files([DataSource(path=str(tmp_path), glob=glob, exclude=exclude)], "data.sources")
        )
        == expected
    )


def test_a_format_of_the_recipe_overrides_the_file_name(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.json", '{"text": "one"}\n{"text": "two"}\n')
    assert list_texts(DataSource(path=path, format="jsonl")) == ["one", "two"]
    assert len(list_texts(DataSource(path=path, format="text"))) == 1


@pytest.mark.parametrize("name", ["a.csv", "a.txt.xz", "a.zip", "a.bin", "a.feather"])
def test_unsupported_formats_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        DataError, match=r"files are not supported.*JSON lines .*Parquet or Arrow.*\)\. [A-Z]"
    ):
        list_files([DataSource(path=write_text(tmp_path / name, "x"))], "data.sources")


def test_errors_for_wrong_paths_name_the_field(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.sources\.1\.path: no such file or folder"):
        list_files(
            [
                DataSource(path=write_text(tmp_path / "a.txt", "x")),
                DataSource(path=str(tmp_path / "absent")),
            ],
            "data.sources",
        )
    with pytest.raises(
        DataError, match=r"in braces only: write \$\{NO_SUCH\}\. Relative paths start"
    ):
        list_files([DataSource(path="$NO_SUCH/corpus.txt")], "data.sources")
    write_text(tmp_path / "only" / "a.png", "x")
    with pytest.raises(DataError, match=r"known format.*\.png"):
        list_files([DataSource(path=str(tmp_path / "only"))], "data.sources")
    with pytest.raises(DataError, match=r"matches '\*\.py'"):
        list_files([DataSource(path=str(tmp_path / "only"), glob="*.py")], "data.sources")
    with pytest.raises(DataError, match="apply to folders"):
        list_files([DataSource(path=str(tmp_path / "a.txt"), glob="*.py")], "data.sources")
