"""Files of token ids in a real S3 server: failing requests, lagging listings, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwright.data.preparation import prepare_data
from shardwright.data.prepared_data import PreparedData
from shardwright.data.tokens.token_export import write_prepared_tokens
from shardwright.errors import DataError
from tests.object_store.conftest import SECRET_KEY, Server, get_client
from tests.object_store.proxy import Request
from tests.unit.data.recipes import build_recipe, story, write_json_lines
from tests.unit.data.test_streaming import build_streamed, chat_folder

URL = "s3://bucket/tokens"
SOURCE = {"path": f"{URL}/train", "format": "tokens"}


def prepare_texts(folder: Path) -> PreparedData:
    chat_folder(folder / "tokenizer")
    source = write_json_lines(folder / "texts.jsonl", [story(number) for number in range(30)])
    return prepare(folder, source)


def prepare(folder: Path, source: Any) -> PreparedData:
    tokenizer = {"kind": "huggingface", "path": str(folder / "tokenizer")}
    return prepare_data(build_recipe(folder, source, tokenizer=tokenizer, packing="documents"))


def read_samples(data: PreparedData) -> list[bytes]:
    return [data.train.get_sample(number).input_ids.tobytes() for number in range(len(data.train))]


def test_every_request_of_writing_and_reading_may_fail_at_first(
    store: Server, tmp_path: Path
) -> None:
    data = prepare_texts(tmp_path)
    failed: set[tuple[str, str, str]] = set()

    def fail_once(request: Request) -> int | None:
        name = (request.method, request.key, request.byte_range)
        if name in failed:
            return None
        failed.add(name)
        return 503

    store.proxy.fault = fail_once
    written = write_prepared_tokens(data, URL, 300)
    assert len(written.files) > 1
    assert read_samples(prepare(tmp_path, SOURCE)) == read_samples(data)
    assert {method for method, _, _ in failed} >= {"PUT", "GET"}


def test_a_listing_that_lags_is_an_error_instead_of_a_part_of_the_data(
    store: Server, tmp_path: Path
) -> None:
    data = prepare_texts(tmp_path)
    write_prepared_tokens(data, str(tmp_path / "tokens"), 300)
    first, *others = sorted((tmp_path / "tokens/train").iterdir())
    client = get_client()
    client.pipe_file(f"bucket/tokens/train/{first.name}", first.read_bytes())
    store.proxy.freeze_listings()
    for path in others:
        client.pipe_file(f"bucket/tokens/train/{path.name}", path.read_bytes())
    streamed = build_streamed(tmp_path, SOURCE, packing="documents")
    with pytest.raises(DataError, match=f"is missing.*no {others[0].name}"):
        prepare(tmp_path, SOURCE)
    with pytest.raises(DataError, match=f"is missing.*no {others[0].name}"):
        prepare_data(streamed)
    store.proxy.frozen_sizes = None
    assert read_samples(prepare(tmp_path, SOURCE)) == read_samples(data)
    assert prepare_data(streamed).report.train.counts.num_documents == 30


def test_a_truncated_object_is_named(store: Server, tmp_path: Path) -> None:
    write_prepared_tokens(prepare_texts(tmp_path), URL, 300)
    client = get_client()
    name = max(client.find("bucket/tokens/train"))
    client.pipe_file(name, client.cat_file(name)[:-10])
    with pytest.raises(DataError, match=r"damaged or truncated") as caught:
        prepare(tmp_path, SOURCE)
    assert name.rpartition("/")[2] in str(caught.value)


def test_a_store_that_refuses_is_one_error_and_no_bucket_is_created(
    store: Server, tmp_path: Path
) -> None:
    data = prepare_texts(tmp_path)
    with pytest.raises(DataError, match=r"--write-tokens: cannot be written") as caught:
        write_prepared_tokens(data, "s3://misspelled/tokens")
    assert SECRET_KEY not in str(caught.value)
    buckets = get_client().call_s3("list_buckets")["Buckets"]
    assert [bucket["Name"] for bucket in buckets] == ["bucket"]
    store.proxy.fault = lambda request: 403 if request.method == "PUT" else None
    store.proxy.requests.clear()
    with pytest.raises(DataError, match=r"--write-tokens: cannot be written") as caught:
        write_prepared_tokens(data, URL)
    assert SECRET_KEY not in str(caught.value)
    assert [request.method for request in store.proxy.requests].count("PUT") == 1, "no retry"
