"""Sources behind an fsspec URL: fetched once, told apart by their version, read like files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from shardwright.data.preparation import prepare_data
from shardwright.errors import DataError
from tests.unit.data.recipes import recipe_of, story

TEXTS = [story(number) for number in range(20)]


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    files = fsspec.filesystem("memory")
    yield files
    for path in list(files.store):
        del files.store[path]


def put(files: fsspec.AbstractFileSystem, path: str, texts: list[str]) -> None:
    with files.open(path, "wb") as stream:
        stream.write("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())


def test_a_file_behind_a_url(tmp_path: Path, memory: fsspec.AbstractFileSystem) -> None:
    put(memory, "/bucket/a.jsonl", TEXTS)
    (tmp_path / "a.jsonl").write_bytes(memory.cat("/bucket/a.jsonl"))
    there = prepare_data(recipe_of(tmp_path / "x", "memory://bucket/a.jsonl"))
    here = prepare_data(recipe_of(tmp_path / "y", str(tmp_path / "a.jsonl")))
    assert there.content_hash == here.content_hash, "the same bytes under the same name"
    assert there.report.sources[0].path == "memory://bucket/a.jsonl"
    assert (
        prepare_data(recipe_of(tmp_path / "z", (tmp_path / "a.jsonl").as_uri())).content_hash
        == here.content_hash
    )


def test_it_is_fetched_once_and_again_when_it_changed(
    tmp_path: Path, memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(memory, "/bucket/a.jsonl", TEXTS)
    recipe = recipe_of(tmp_path, "memory://bucket/a.jsonl")
    first = prepare_data(recipe)
    with monkeypatch.context() as closed:
        closed.setattr(type(memory), "open", lambda *_, **__: pytest.fail("fetched again"))
        assert prepare_data(recipe).content_hash == first.content_hash
    put(memory, "/bucket/a.jsonl", TEXTS[::-1])  # of the same size
    assert prepare_data(recipe).content_hash != first.content_hash
    put(memory, "/bucket/a.jsonl", TEXTS[:-1])
    assert prepare_data(recipe).report.records.num_records == len(TEXTS) - 1


def test_a_folder_behind_a_url_with_what_is_chosen(
    tmp_path: Path, memory: fsspec.AbstractFileSystem
) -> None:
    put(memory, "/set/b/two.jsonl", TEXTS[10:])
    put(memory, "/set/one.jsonl", TEXTS[:10])
    memory.pipe("/set/picture.png", b"no text")
    report = prepare_data(recipe_of(tmp_path, "memory://set")).report
    assert (report.num_files, report.records.num_records) == (2, 20)
    assert not list((tmp_path / "cache" / "fetched").rglob("*.png"))
    chosen = prepare_data(recipe_of(tmp_path, {"path": "memory://set", "glob": "one*"})).report
    assert chosen.records.num_records == 10


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("memory://nowhere/a.jsonl", "the URL has no files to read|cannot be reached"),
        ("nonsense://a/b.jsonl", r"data\.sources\.0\.path.*nonsense"),
    ],
)
def test_what_cannot_be_fetched_is_told(tmp_path: Path, path: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        prepare_data(recipe_of(tmp_path, path))


def test_a_transfer_that_fails_leaves_nothing(
    tmp_path: Path, memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(memory, "/bucket/a.jsonl", TEXTS)

    def fail(*_: object, **__: object) -> object:
        raise ConnectionError("the line is dead")

    monkeypatch.setattr(type(memory), "open", fail)
    with pytest.raises(DataError, match=r"the transfer failed: the line is dead"):
        prepare_data(recipe_of(tmp_path, "memory://bucket/a.jsonl"))
    assert list((tmp_path / "cache" / "fetched").iterdir()) == []
