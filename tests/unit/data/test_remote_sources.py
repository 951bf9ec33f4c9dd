"""Sources behind an fsspec URL: fetched once per version, then read like local files."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from shardwright.data.preparation import prepare_data
from shardwright.errors import DataError
from tests.unit.data.recipes import build_recipe, story

TEXTS = [story(number) for number in range(20)]


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    files = fsspec.filesystem("memory")
    yield files
    for path in list(files.store):
        del files.store[path]


def write_texts(files: fsspec.AbstractFileSystem, path: str, texts: list[str]) -> None:
    with files.open(path, "wb") as stream:
        stream.write("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())


def test_a_file_behind_a_url_gives_the_data_of_a_local_file(
    tmp_path: Path, memory: fsspec.AbstractFileSystem
) -> None:
    write_texts(memory, "/bucket/a.jsonl", TEXTS)
    (tmp_path / "a.jsonl").write_bytes(memory.cat("/bucket/a.jsonl"))
    remote = prepare_data(build_recipe(tmp_path / "x", "memory://bucket/a.jsonl"))
    local = prepare_data(build_recipe(tmp_path / "y", str(tmp_path / "a.jsonl")))
    assert remote.content_hash == local.content_hash, "the same bytes under the same name"
    assert remote.report.sources[0].path == "memory://bucket/a.jsonl"
    assert (
        prepare_data(build_recipe(tmp_path / "z", (tmp_path / "a.jsonl").as_uri())).content_hash
        == local.content_hash
    )


def test_a_file_is_fetched_once_and_again_after_a_change(
    tmp_path: Path, memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(memory, "/bucket/a.jsonl", TEXTS)
    recipe = build_recipe(tmp_path, "memory://bucket/a.jsonl")
    first = prepare_data(recipe)
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "open", lambda *_, **__: pytest.fail("fetched again"))
        assert prepare_data(recipe).content_hash == first.content_hash
    write_texts(memory, "/bucket/a.jsonl", TEXTS[::-1])  # of the same size
    assert prepare_data(recipe).content_hash != first.content_hash
    write_texts(memory, "/bucket/a.jsonl", TEXTS[:-1])
    assert prepare_data(recipe).report.records.num_records == len(TEXTS) - 1


def test_a_folder_behind_a_url_is_filtered_by_glob(
    tmp_path: Path, memory: fsspec.AbstractFileSystem
) -> None:
    write_texts(memory, "/set/b/two.jsonl", TEXTS[10:])
    write_texts(memory, "/set/one.jsonl", TEXTS[:10])
    memory.pipe("/set/picture.png", b"no text")
    report = prepare_data(build_recipe(tmp_path, "memory://set")).report
    assert (report.num_files, report.records.num_records) == (2, 20)
    assert not list((tmp_path / "cache" / "fetched").rglob("*.png"))
    filtered = prepare_data(build_recipe(tmp_path, {"path": "memory://set", "glob": "one*"})).report
    assert filtered.records.num_records == 10


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("memory://nowhere/a.jsonl", "the URL has no files to read|cannot be reached"),
        ("nonsense://a/b.jsonl", r"data\.sources\.0\.path.*nonsense"),
    ],
)
def test_a_url_that_cannot_be_fetched_is_an_error(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepare_data(build_recipe(tmp_path, path))


def test_a_failed_transfer_leaves_no_files(
    tmp_path: Path, memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(memory, "/bucket/a.jsonl", TEXTS)

    def fail(*_: object, **__: object) -> object:
        raise ConnectionError("connection lost")

    monkeypatch.setattr(type(memory), "open", fail)
    monkeypatch.setattr("shardwright.store_requests.FIRST_DELAY_SECONDS", 0.0)
    with pytest.raises(DataError, match=r"the transfer failed: connection lost"):
        prepare_data(build_recipe(tmp_path, "memory://bucket/a.jsonl"))
    assert list((tmp_path / "cache" / "fetched").iterdir()) == []


@pytest.mark.parametrize(
    ("status", "message"), [(404, "cannot be reached: 404"), (403, "cannot be reached: 403")]
)
def test_a_refused_web_page_is_named_with_its_cause(
    tmp_path: Path, status: int, message: str
) -> None:
    class Refusal(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusal)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/a.jsonl"
        with pytest.raises(DataError, match=message):
            prepare_data(build_recipe(tmp_path, url))
    finally:
        server.shutdown()
        server.server_close()
