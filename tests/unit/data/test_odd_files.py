"""Files as people have them: what is wrong is told by file and line, and nothing is learnt by
accident or dropped in silence.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from shardwright.data.preparation import PreparedData, prepare_data
from shardwright.errors import DataError, InputError, TokenizerError
from tests.unit.data.chat_tokenizers import turns, write_records
from tests.unit.data.test_conversations import chat_recipe

CHATS = [{"messages": turns(f"question {number}", f"answer {number}")} for number in range(6)]


def prepared(folder: Path, sources: Any, **options: Any) -> PreparedData:
    return prepare_data(chat_recipe(folder, sources, **options))


def refusal(folder: Path, sources: Any, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        prepared(folder, sources, **options)
    assert isinstance(caught.value, DataError | TokenizerError)
    return str(caught.value)


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(CHATS).slice(0, 0)
        if not rows
        else pyarrow.Table.from_pylist(rows),
        path,
    )
    return str(path)


def test_text_among_conversations_has_to_be_asked_for(tmp_path: Path) -> None:
    """A dataset's card beside its records would be learnt whole."""
    parquet(tmp_path / "set" / "data" / "a.parquet", CHATS)
    (tmp_path / "set" / "README.md").write_text("# About this set")
    told = refusal(tmp_path, str(tmp_path / "set"))
    assert "README.md" in told
    assert "exclude: ['README.md']" in told
    without = {"path": str(tmp_path / "set"), "exclude": ["README.md"]}
    assert prepared(tmp_path, without).report.train.counts.num_documents == len(CHATS)
    both = [without, str(tmp_path / "set" / "README.md")]
    assert prepared(tmp_path, both).report.train.counts.num_documents == len(CHATS) + 1


def test_files_that_are_passed_over_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_records(tmp_path / "set" / "a.jsonl", *CHATS)
    for name in ("b.csv", "c.csv", "d.png", "dataset_infos.json"):
        (tmp_path / "set" / name).write_text("a,b")
    with caplog.at_level(logging.WARNING, logger="shardwright"):
        prepared(tmp_path, str(tmp_path / "set"))
    assert (
        "data.sources.0.path: skipped files of unsupported formats: 2 .csv, 1 .png" in caplog.text
    )


def test_a_source_that_is_there_twice_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_records(tmp_path / "set" / "a.jsonl", *CHATS)
    with caplog.at_level(logging.WARNING, logger="shardwright"):
        prepared(tmp_path, [path, str(tmp_path / "set")])
    assert "data.sources.1.path: 1 of its files also belong to an earlier source" in caplog.text


def test_a_table_without_rows_is_an_empty_file(tmp_path: Path) -> None:
    empty = parquet(tmp_path / "empty.parquet", [])
    full = parquet(tmp_path / "full.parquet", CHATS)
    assert "contain no text" in refusal(tmp_path, empty)
    report = prepared(tmp_path, [empty, full]).report
    assert (report.records.num_empty_files, report.train.counts.num_documents) == (1, len(CHATS))


def test_records_within_one_object_are_found_out(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"version": 1, "data": CHATS}))
    assert "the records in its field 'data'" in refusal(tmp_path, str(tmp_path / "a.json"))


def test_objects_over_several_lines_are_no_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(chat, indent=1) for chat in CHATS))
    assert "JSON lines have one record per line" in refusal(tmp_path, str(tmp_path / "a.jsonl"))


def test_a_template_that_is_none_is_no_fault_of_the_records(tmp_path: Path) -> None:
    told = refusal(
        tmp_path,
        write_records(tmp_path / "a.jsonl", *CHATS),
        template="{% for m in messages %}\n{{ m",
    )
    assert told.startswith("data.chat_template: the chat template is not valid Jinja")
    assert "line 2: {{ m" in told


def test_an_id_of_another_tokenizer_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = write_records(
        tmp_path / "a.jsonl", *[{"input_ids": [1, 2, 3]}] * 4, {"input_ids": [1, 999_999]}
    )
    assert "token id 999999 in a.jsonl:5" in refusal(tmp_path, path)


def test_a_truth_value_is_no_id(tmp_path: Path) -> None:
    path = write_records(
        tmp_path / "a.jsonl", *[{"input_ids": [1, 2, 3]}] * 4, {"input_ids": [True, 2]}
    )
    found = prepared(tmp_path, path, max_broken_fraction=0.5).report.records
    assert [(item.line, item.reason) for item in found.broken] == [
        (5, "'input_ids' is not a list of integers")
    ]
