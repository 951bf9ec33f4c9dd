"""Inputs that never end, have no line ends, or cannot be opened: each gives an error in bounded
time.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from shardwright import files
from shardwright.config.data import DataSource
from shardwright.data.preparation import prepare_data
from shardwright.data.records import record_files
from shardwright.data.records.record_files import read_rows
from shardwright.data.sources import source_reader
from shardwright.data.sources.file_listing import list_files
from shardwright.data.sources.source_reader import BrokenRecord, TextPiece, read_files
from shardwright.data.tokens import token_store, tokenizer_loading
from shardwright.data.tokens.tokenizer_loading import train_bpe
from shardwright.errors import DataError, InputError
from tests.unit.data.recipes import build_recipe, story, write_json_lines
from tests.unit.data.test_tokenizer import save_folder, sentencepiece_like


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def link_to_dev_zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            # The path of a socket is limited to 107 bytes.
            server.bind(f"/proc/self/fd/{directory}/{path.name}")
        finally:
            os.close(directory)


IRREGULAR: dict[str, Callable[[Path], None]] = {
    "FIFO": make_fifo,
    "character device": link_to_dev_zero,
    "socket": make_socket,
}


def prepare_and_get_error(folder: Path, path: Any, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        prepare_data(build_recipe(folder, path, **options))
    return str(caught.value)


@pytest.mark.parametrize("kind", IRREGULAR)
def test_a_source_that_is_not_a_regular_file_is_refused(tmp_path: Path, kind: str) -> None:
    IRREGULAR[kind](tmp_path / "a.jsonl")
    message = prepare_and_get_error(tmp_path, str(tmp_path / "a.jsonl"))
    assert f"data.sources.0.path: the path is a {kind}" in message
    assert "Write its content to a regular file" in message


@pytest.mark.parametrize("kind", IRREGULAR)
def test_an_irregular_file_in_a_folder_is_skipped_with_a_warning(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_json_lines(tmp_path / "set" / "a.jsonl", [story(1), story(2)])
    IRREGULAR[kind](tmp_path / "set" / "b.jsonl")
    (tmp_path / "set" / "more").symlink_to(tmp_path)
    with caplog.at_level(logging.WARNING, logger="shardwright"):
        assert prepare_data(build_recipe(tmp_path, str(tmp_path / "set"))).report.num_files == 1
    assert (
        f"skipped, because they are not regular files: b.jsonl (a {kind}), "
        "more (a link to a folder)" in caplog.text
    )


@pytest.mark.parametrize("kind", IRREGULAR)
def test_a_file_replaced_after_listing_does_not_block(tmp_path: Path, kind: str) -> None:
    path = Path(write_json_lines(tmp_path / "a.jsonl", [story(1)]))
    listed = list_files([DataSource(path=str(path))], "data.sources")
    path.unlink()
    IRREGULAR[kind](path)
    with pytest.raises(DataError, match="not a regular file"):
        list(read_files(listed))


def test_broken_and_circular_links_are_errors(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.txt").symlink_to(tmp_path / "set" / "b.txt")
    assert "a symbolic link is broken" in prepare_and_get_error(tmp_path, str(tmp_path / "set"))
    (tmp_path / "set" / "b.txt").symlink_to(tmp_path / "set" / "a.txt")
    assert "Too many levels of symbolic links" in prepare_and_get_error(
        tmp_path, str(tmp_path / "set")
    )
    assert "Too many levels of symbolic links" in prepare_and_get_error(
        tmp_path, str(tmp_path / "set" / "a.txt")
    )
    excluded = {"path": str(tmp_path / "set"), "exclude": ["a.txt", "b.txt"]}
    assert "no file in the folder" in prepare_and_get_error(tmp_path, excluded)


@pytest.mark.parametrize("name", ["tokenizer.json", "template"])
def test_irregular_tokenizer_and_template_files_do_not_block(tmp_path: Path, name: str) -> None:
    folder = save_folder(sentencepiece_like(), tmp_path / "tokenizer")
    path = write_json_lines(tmp_path / "a.jsonl", ["ab"])
    (folder / "tokenizer_config.json").unlink()
    options: dict[str, Any] = {}
    if name == "template":
        make_fifo(tmp_path / "template")
        chat = tmp_path / "chat.jsonl"
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        chat.write_text(json.dumps({"messages": turns}))
        path = str(chat)
        options = {"chat_template": str(tmp_path / "template")}
    else:
        (folder / name).unlink()
        (folder / name).symlink_to("/dev/zero")
    tokenizer = {"kind": "huggingface", "path": str(folder)}
    with pytest.raises(InputError):
        prepare_data(build_recipe(tmp_path, path, tokenizer=tokenizer, **options), 1)


@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_lines_may_end_with_carriage_returns(tmp_path: Path, form: str) -> None:
    texts = [story(number) for number in range(5)]
    path = tmp_path / f"a.{form}"
    path.write_bytes(b"\r".join(json.dumps({"text": text}).encode() for text in texts))
    rows = list(read_rows(path, form, None))
    assert [row.value for row in rows] == [{"text": text} for text in texts]
    assert [row.line for row in rows] == [1, 2, 3, 4, 5]


def test_line_ends_may_be_mixed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}\r\r{"a": "\xe2\x80\xa8\xc2\x85"}\n{"a": "\xff"}\r{"a": 5'
    )
    rows = list(read_rows(path, "jsonl", None))
    assert [row.line for row in rows] == [1, 2, 4, 5, 6]
    assert [row.value for row in rows[:3]] == [{"a": 1}, {"a": 2}, {"a": "\u2028\u0085"}]
    assert rows[3].reason == "not UTF-8: invalid start byte at byte 7"
    assert rows[4].reason.startswith("not JSON")


def test_a_line_that_does_not_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of a few kilobytes may decompress to a line of terabytes."""
    monkeypatch.setattr(record_files, "MAX_RECORD_BYTES", 1000)
    monkeypatch.setattr(record_files, "_CHARACTERS_PER_SKIP", 1000)
    monkeypatch.setattr(record_files, "_MAX_SKIPPED_CHARACTERS", 10_000)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' + b"x" * 8000 + b"\n"))
    assert [row.reason for row in read_rows(path, "jsonl", "gzip")] == [
        "",
        "longer than 1,000 characters",
    ]
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' + b"x" * 20_000))
    with pytest.raises(DataError, match="a line has no end within the limit") as caught:
        list(read_rows(path, "jsonl", "gzip"))
    assert caught.value.field == f"{path}:2"
    assert "10,000 characters" in str(caught.value)


def test_text_that_cannot_be_split_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_reader, "PIECE_NUM_CHARACTERS", 64)
    monkeypatch.setattr(source_reader, "MAX_UNSPLIT_CHARACTERS", 4000)
    path = tmp_path / "a.txt"
    path.write_text("some words\n" * 3 + "x" * 5000)
    message = prepare_and_get_error(tmp_path, str(path))
    assert f"{path}:4" in message
    assert "no line end or space" in message
    assert "4,000 characters" in message
    for name, texts in (("words", ["word " * 2000]), ("unbroken", ["fine"] * 200 + ["x" * 5000])):
        path_of_records = write_json_lines(tmp_path / f"{name}.jsonl", texts)
        items = list(read_files(list_files([DataSource(path=path_of_records)], "data.sources")))
        pieces = [item for item in items if isinstance(item, TextPiece)]
        broken = [item for item in items if isinstance(item, BrokenRecord)]
        if name == "words":
            assert "".join(piece.text for piece in pieces) == texts[0]
            assert max(len(piece.text) for piece in pieces) < 3 * 16 * 64
            assert [piece.is_document_start for piece in pieces] == [True] + [False] * (
                len(pieces) - 1
            )
            assert [piece.is_document_end for piece in pieces] == [False] * (len(pieces) - 1) + [
                True
            ]
        else:
            assert len(pieces) == 200
            assert [item.line for item in broken] == [201]
            assert "4,000 characters without a space" in broken[0].reason


def test_long_records_in_pieces_give_the_same_ids_as_whole_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_json_lines(
        tmp_path / "a.jsonl", [" ".join(story(number) for number in range(300)), "short"]
    )
    tokenizer = {"kind": "bpe", "vocab_size": 350}
    whole = prepare_data(build_recipe(tmp_path / "whole", path, tokenizer=tokenizer))
    monkeypatch.setattr(source_reader, "PIECE_NUM_CHARACTERS", 16)
    pieces = prepare_data(build_recipe(tmp_path / "pieces", path, tokenizer=tokenizer))
    assert pieces.train.tokens.tolist() == whole.train.tokens.tolist()  # type: ignore[attr-defined]
    assert pieces.report.train.counts.num_documents == 2


def test_a_tokenizer_that_needs_whole_documents_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_reader, "PIECE_NUM_CHARACTERS", 64)
    monkeypatch.setattr(token_store, "MAX_RECORD_BYTES", 1000)
    fast = sentencepiece_like()
    fast.pre_tokenizer = None
    folder = save_folder(fast, tmp_path / "tokenizer", eos_token="</s>")
    (tmp_path / "a.txt").write_text("ab ab\n" * 1000)
    message = prepare_and_get_error(
        tmp_path, str(tmp_path / "a.txt"), tokenizer={"kind": "huggingface", "path": str(folder)}
    )
    assert "too long for this tokenizer" in message
    assert "1,000 characters" in message


def test_long_words_are_split_before_bpe_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's time grows with the square of a word's length: hours for a megabyte."""
    parts: list[str] = []
    split_long_words = tokenizer_loading._split_long_words
    monkeypatch.setattr(
        tokenizer_loading,
        "_split_long_words",
        lambda texts: (parts.append(part) or part for part in split_long_words(texts)),
    )
    texts = [
        "a short text",
        "x" * 50_000 + " end" + " " * 20_000,
        "y" * tokenizer_loading.MAX_WORD_CHARACTERS,
    ]
    tokenizer = train_bpe(iter(texts), 300)
    assert (
        max(len(run) for part in parts for run in re.findall(r"\S+|\s+", part))
        == tokenizer_loading.MAX_WORD_CHARACTERS
    )
    assert "".join(parts) == "".join(texts)
    assert len(tokenizer.encode("x" * 1024)) == 1


def test_an_object_of_many_fields_is_checked_in_linear_time(tmp_path: Path) -> None:
    """Checking for a repeated field must not take time quadratic in the number of fields."""
    fields = ", ".join(f'"k{number}": 0' for number in range(100_000))
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{{fields}, "twice": 1, "twice": 2}}\n')
    assert [row.reason for row in read_rows(path, "jsonl", None)] == [
        "the field 'twice' occurs twice"
    ]


def test_numbers_of_many_digits_are_reported_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"a": 1},\n{"a": ' + "7" * 5000 + '},\n{"a": 3}]')
    rows = list(read_rows(path, "json", None))
    assert [(row.line, row.value, row.reason) for row in rows] == [
        (1, {"a": 1}, ""),
        (2, None, "a number has 5,000 digits"),
        (3, {"a": 3}, ""),
    ]


def test_an_array_after_much_white_space_is_read_in_one_pass(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(" \n" * 400_000 + '[{"a": 1},' + " " * 400_000 + '{"a": 2}]')
    assert [(row.line, row.value) for row in read_rows(path, "json", None)] == [
        (400_001, {"a": 1}),
        (400_001, {"a": 2}),
    ]


def test_rows_of_large_texts_are_read_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_files, "_MAX_BATCH_BYTES", 1000)
    monkeypatch.setattr(source_reader, "MAX_RECORD_BYTES", 3000)
    texts = ["short", "word " * 300, "word " * 900]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    items = list(
        read_files(list_files([DataSource(path=str(tmp_path / "a.parquet"))], "data.sources"))
    )
    assert [item.text for item in items if isinstance(item, TextPiece)] == texts[:2]
    assert [item.reason for item in items if isinstance(item, BrokenRecord)] == [
        "longer than 3,000 characters"
    ]


def test_reasons_are_short_enough_to_print(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"\ud800" * 5000: 1}) + "\n")
    message = prepare_and_get_error(tmp_path, str(path))
    assert "a.jsonl:2 no field 'text'" in message
    assert len(message) < 1000


def test_a_damaged_hash_file_is_computed_again(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "a.jsonl", [story(1), story(2)])
    os.utime(path, (1, 1))
    first = prepare_data(build_recipe(tmp_path, path))
    (hash_file,) = (tmp_path / "cache" / "hashes").iterdir()
    for content in ("[]", "null", json.dumps({path: 3}), "[" * 5000):
        hash_file.write_text(content)
        assert prepare_data(build_recipe(tmp_path, path)).content_hash == first.content_hash


def test_reading_a_text_file_has_a_size_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r")
    assert files.read_text(tmp_path / "a") == "one\ntwo\n"
    with pytest.raises(OSError, match="larger than 0 KiB"):
        files.read_text(tmp_path / "a", max_bytes=5)
    with pytest.raises(OSError, match="null byte"):
        files.read_text("a\0b")
    assert files.detect_file_kind(tmp_path / "absent") == "absent"
