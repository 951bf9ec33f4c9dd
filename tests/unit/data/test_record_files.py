"""Files of records: streamed JSON arrays, Arrow folders, truncated files and repeated fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from shardwright.config.data import DataSource
from shardwright.data.records import record_files
from shardwright.data.records.record_files import RecordRow, read_rows
from shardwright.data.sources.file_listing import list_files
from shardwright.data.sources.source_reader import (
    BrokenRecord,
    TextPiece,
    detect_schemas,
    read_files,
)
from shardwright.errors import DataError

ROWS: list[dict[str, Any]] = [
    {"a": "x" * 50, "b": [1, 2.5]},
    {"a": "é\n}{"},
    {"c": {"d": None}},
    {"e": 1},
]


def list_rows(path: Path, form: str) -> list[RecordRow]:
    return list(read_rows(path, form, None))


def write_arrow(folder: Path, tables: list[pyarrow.Table]) -> str:
    """Write a folder as `datasets.save_to_disk` does: stream files, state.json, a description."""
    folder.mkdir(parents=True)
    names = []
    for number, table in enumerate(tables):
        names.append(f"data-{number:05}-of-{len(tables):05}.arrow")
        with (
            pyarrow.OSFile(str(folder / names[-1]), "wb") as file,
            pyarrow.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names], "_split": "train"})
    )
    (folder / "dataset_info.json").write_text("{}")
    return str(folder)


def read_source(source: DataSource) -> list[TextPiece | BrokenRecord]:
    return list(
        read_files(detect_schemas(list_files([source], "data.sources"), [source], "data.sources"))
    )


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("block", [1, 7, 1 << 18])
def test_an_array_is_streamed_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None, block: int
) -> None:
    monkeypatch.setattr(record_files, "_BLOCK_NUM_CHARACTERS", block)
    (tmp_path / "a.json").write_text(
        "\n\n" + json.dumps(ROWS, indent=indent, ensure_ascii=False), encoding="utf-8"
    )
    rows = list_rows(tmp_path / "a.json", "json")
    assert [row.value for row in rows] == ROWS
    if indent is None:
        assert {row.line for row in rows} == {3}
    else:
        text = (tmp_path / "a.json").read_text(encoding="utf-8").split("\n")
        assert all(text[row.line - 1].strip().startswith("{") for row in rows)


def test_json_lines_in_a_file_named_json_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert [row.value for row in list_rows(tmp_path / "a.json", "json")] == ROWS


@pytest.mark.parametrize("num_characters", [2, 20, 75, 95])
def test_a_truncated_array_is_reported_with_its_line(tmp_path: Path, num_characters: int) -> None:
    text = json.dumps(ROWS)
    (tmp_path / "a.json").write_text(text[:num_characters])
    *good, last = list_rows(tmp_path / "a.json", "json")
    assert [row.value for row in good] == ROWS[: len(good)]
    assert last.value is None
    assert "truncated" in last.reason


def test_a_damaged_array_is_an_error_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('\n[{"a": 1}, oops, {"a": 2}]')
    with pytest.raises(DataError, match=r"a\.json:2.*not JSON"):
        list_rows(tmp_path / "a.json", "json")


def test_a_repeated_field_is_a_broken_record(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "text": "two"}\n{"text": "three"}\n')
    first, second = list_rows(tmp_path / "a.jsonl", "jsonl")
    assert first == RecordRow(1, None, "the field 'text' occurs twice")
    assert second.value == {"text": "three"}


@pytest.mark.parametrize("block", [2, 7, 1 << 18])
def test_a_repeated_field_in_an_array_does_not_stop_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(record_files, "_BLOCK_NUM_CHARACTERS", block)
    (tmp_path / "a.json").write_text(
        '[{"text": "one"},\n{"b": {"c": 1, "c": [2, 3]}, "d": 4},\n{"text": "three"}]'
    )
    first, second, third = list_rows(tmp_path / "a.json", "json")
    assert second == RecordRow(2, None, "the field 'c' occurs twice")
    assert [first.value, third.value] == [{"text": "one"}, {"text": "three"}]


@pytest.mark.parametrize(("form", "encoding"), [("jsonl", "utf-16-le"), ("json", "utf-16-be")])
def test_another_encoding_is_an_error_that_names_it(
    tmp_path: Path, form: str, encoding: str
) -> None:
    (tmp_path / "a").write_bytes("\ufeff[]".encode(encoding))
    with pytest.raises(DataError, match="UTF-16"):
        list_rows(tmp_path / "a", form)


def test_an_enormous_line_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_files, "MAX_RECORD_BYTES", 100)
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"text": "x" * 350}) + "\n" + json.dumps({"text": "y"}) + "\n"
    )
    first, second = list_rows(tmp_path / "a.jsonl", "jsonl")
    assert (first.line, first.value) == (1, None)
    assert (second.line, second.value) == (2, {"text": "y"})


def test_fields_that_only_other_objects_have_are_absent(tmp_path: Path) -> None:
    """Parquet gives each object of a column all fields of the column, as null."""
    rows: list[dict[str, Any]] = [
        {"tools": [{"name": "f", "properties": {"a": {"type": "integer"}}}], "text": "x"},
        {"tools": [{"name": "g", "properties": {"b": {"type": "string"}}}], "text": None},
    ]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert [row.value for row in list_rows(path, "parquet")] == rows


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_a_repeated_column_is_refused(tmp_path: Path, form: str) -> None:
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    path = tmp_path / f"a.{form}"
    if form == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with (
            pyarrow.OSFile(str(path), "wb") as file,
            pyarrow.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table)
    with pytest.raises(DataError, match=r"same name.*text"):
        list_rows(path, form)


def test_a_datasets_folder_is_read_in_the_order_of_state_json(tmp_path: Path) -> None:
    tables = [
        pyarrow.table({"text": [f"{part} {row}" for row in range(300)], "id": range(300)})
        for part in "ba"
    ]
    pieces = read_source(DataSource(path=write_arrow(tmp_path / "set", tables)))
    assert [piece.text for piece in pieces if isinstance(piece, TextPiece)] == [
        f"{part} {row}" for part in "ba" for row in range(300)
    ]


def test_an_arrow_file_of_batches_is_read(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["one", "two"]})
    with (
        pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as file,
        pyarrow.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table)
    assert [
        piece.text
        for piece in read_source(DataSource(path=str(tmp_path / "a.arrow")))
        if isinstance(piece, TextPiece)
    ] == ["one", "two"]


def test_a_folder_of_several_splits_requires_a_choice(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_arrow(tmp_path / "set" / split, [pyarrow.table({"text": [split]})])
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"several splits.*set/test, .*set/train"):
        read_source(DataSource(path=str(tmp_path / "set")))
    (piece,) = read_source(DataSource(path=str(tmp_path / "set" / "test")))
    assert isinstance(piece, TextPiece)
    assert piece.text == "test"


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_datasets_folder_is_an_error(tmp_path: Path, damage: str) -> None:
    path = write_arrow(tmp_path / "set", [pyarrow.table({"text": ["some text"] * 1000})])
    (file,) = (tmp_path / "set").glob("*.arrow")
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-4000])
    else:
        file.unlink()
    with pytest.raises(DataError, match=r"arrow"):
        read_source(DataSource(path=path))
