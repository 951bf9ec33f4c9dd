"""Imperfect files: errors name file and line; no text is trained on or dropped by accident."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from shardwright.data.preparation import prepare_data
from shardwright.data.prepared_data import PreparedData
from shardwright.errors import DataError, InputError, TokenizerError
from tests.unit.data.chat_tokenizers import turns, write_records
from tests.unit.data.test_conversations import chat_recipe

CHATS = [{"messages": turns(f"question {number}", f"answer {number}")} for number in range(6)]


def prepare(folder: Path, sources: Any, **options: Any) -> PreparedData:
    return prepare_data(chat_recipe(folder, sources, **options))


def prepare_and_get_error(folder: Path, sources: Any, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        prepare(folder, sources, **options)
    assert isinstance(caught.value, DataError | TokenizerError)
    return str(caught.value)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(CHATS).slice(0, 0)
        if not rows
        else pyarrow.Table.from_pylist(rows),
        path,
    )
    return str(path)


def test_text_among_conversations_must_be_a_source_of_its_own(tmp_path: Path) -> None:
    """Otherwise a dataset's README next to its records would be trained on."""
    write_parquet(tmp_path / "set" / "data" / "a.parquet", CHATS)
    (tmp_path / "set" / "README.md").write_text("# About this set")
    message = prepare_and_get_error(tmp_path, str(tmp_path / "set"))
    assert "README.md" in message
    assert "exclude: ['README.md']" in message
    without = {"path": str(tmp_path / "set"), "exclude": ["README.md"]}
    assert prepare(tmp_path, without).report.train.counts.num_documents == len(CHATS)
    both = [without, str(tmp_path / "set" / "README.md")]
    assert prepare(tmp_path, both).report.train.counts.num_documents == len(CHATS) + 1


def test_skipped_files_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_records(tmp_path / "set" / "a.jsonl", *CHATS)
    for name in ("b.csv", "c.csv", "d.png", "dataset_infos.json"):
        (tmp_path / "set" / name).write_text("a,b")
    with caplog.at_level(logging.WARNING, logger="shardwright"):
        prepare(tmp_path, str(tmp_path / "set"))
    assert (
        "data.sources.0.path: skipped files of unsupported formats: 2 .csv, 1 .png" in caplog.text
    )


def test_a_source_listed_twice_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_records(tmp_path / "set" / "a.jsonl", *CHATS)
    with caplog.at_level(logging.WARNING, logger="shardwright"):
        prepare(tmp_path, [path, str(tmp_path / "set")])
    assert "data.sources.1.path: 1 of its files also belong to an earlier source" in caplog.text


def test_a_table_without_rows_is_an_empty_file(tmp_path: Path) -> None:
    empty = write_parquet(tmp_path / "empty.parquet", [])
    full = write_parquet(tmp_path / "full.parquet", CHATS)
    assert "contain no text" in prepare_and_get_error(tmp_path, empty)
    report = prepare(tmp_path, [empty, full]).report
    assert (report.records.num_empty_files, report.train.counts.num_documents) == (1, len(CHATS))


def test_records_inside_one_object_are_detected(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"version": 1, "data": CHATS}))
    assert "the records in its field 'data'" in prepare_and_get_error(
        tmp_path, str(tmp_path / "a.json")
    )


def test_objects_over_several_lines_are_refused_as_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(chat, indent=1) for chat in CHATS))
    assert "JSON lines have one record per line" in prepare_and_get_error(
        tmp_path, str(tmp_path / "a.jsonl")
    )


def test_an_invalid_template_is_reported_as_such(tmp_path: Path) -> None:
    message = prepare_and_get_error(
        tmp_path,
        write_records(tmp_path / "a.jsonl", *CHATS),
        template="{% for m in messages %}\n{{ m",
    )
    assert message.startswith("data.chat_template: the chat template is not valid Jinja")
    assert "line 2: {{ m" in message


def test_an_id_of_another_tokenizer_is_reported_by_file_and_line(tmp_path: Path) -> None:
    path = write_records(
        tmp_path / "a.jsonl", *[{"input_ids": [1, 2, 3]}] * 4, {"input_ids": [1, 999_999]}
    )
    assert "token id 999999 in a.jsonl:5" in prepare_and_get_error(tmp_path, path)


def test_a_boolean_is_not_a_token_id(tmp_path: Path) -> None:
    path = write_records(
        tmp_path / "a.jsonl", *[{"input_ids": [1, 2, 3]}] * 4, {"input_ids": [True, 2]}
    )
    records = prepare(tmp_path, path, max_broken_fraction=0.5).report.records
    assert [(item.line, item.reason) for item in records.broken] == [
        (5, "'input_ids' is not a list of integers")
    ]
