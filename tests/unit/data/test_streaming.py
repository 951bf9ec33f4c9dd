"""Streamed sources: a bounded cache, an order of positions, and resumption at any of them."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from shardwright.config import Recipe
from shardwright.data.preparation import is_prepared, prepare_data
from shardwright.data.prepared_data import PreparedData
from shardwright.data.run_order import build_run_order
from shardwright.data.scheduled_mixture import PositionOrder
from shardwright.data.streaming.shard_cache import CacheFull, Reservation, ShardCache
from shardwright.data.streaming.streamed_dataset import ShardOrder
from shardwright.errors import DataError, InputError
from tests.unit.data.chat_tokenizers import chat_folder
from tests.unit.data.recipes import build_recipe, story, write_json_lines

NUM_FILES = 6
RECORDS = 30


@pytest.fixture
def bucket() -> Iterator[str]:
    """Return the URL of files of text records in memory, removed afterwards."""
    store = fsspec.filesystem("memory")
    for number in range(NUM_FILES):
        lines = [
            json.dumps({"text": story(1000 * number + record)}) + "\n" for record in range(RECORDS)
        ]
        store.pipe(f"/bucket/set/part-{number}.jsonl", "".join(lines).encode())
    yield "memory://bucket/set"
    store.rm("/bucket", recursive=True)


def build_streamed(folder: Path, sources: Any, limit: int = 60_000, **options: Any) -> Recipe:
    if not (folder / "tokenizer").is_dir():
        chat_folder(folder / "tokenizer")
    streaming = {"cache_bytes": limit, "window_files": options.pop("window", 2)}
    tokenizer = {"kind": "huggingface", "path": str(folder / "tokenizer")}
    return build_recipe(folder, sources, tokenizer=tokenizer, streaming=streaming, **options)


def build_order(data: PreparedData, batch: int = 4, seed: int = 0) -> PositionOrder:
    return build_run_order(data.train, seed, batch)


def read_positions(data: PreparedData, positions: range, batch: int = 4) -> list[bytes]:
    order = build_order(data, batch)
    return [
        data.train.get_sample(order.get_index(at), order.get_epoch(at)).input_ids.tobytes()
        for at in positions
    ]


def count_cache_bytes(folder: Path) -> int:
    """Count the bytes of complete shards and of those being built, while others remove some."""
    num_bytes = 0
    for parent, _, names in os.walk(folder / "cache" / "streamed" / "shards"):
        for name in names:
            with suppress(FileNotFoundError):
                num_bytes += os.stat(os.path.join(parent, name)).st_size
    return num_bytes


def test_every_sample_is_read_once_per_epoch_from_a_cache_smaller_than_the_data(
    tmp_path: Path, bucket: str
) -> None:
    data = prepare_data(build_streamed(tmp_path, bucket, 20_000))
    total = len(data.train)
    token_bytes = 2 * data.report.train.counts.num_tokens
    order = build_order(data)
    largest = 0
    for epoch in range(2):
        indices = []
        for position in range(epoch * total, (epoch + 1) * total):
            assert order.get_epoch(position) == epoch
            indices.append(order.get_index(position))
            data.train.get_sample(indices[-1], epoch)
            largest = max(largest, count_cache_bytes(tmp_path))
        assert sorted(indices) == list(range(total))
        assert indices != sorted(indices)
    assert 0 < largest <= 20_000 < token_bytes


@pytest.mark.parametrize("packing", ["windows", "documents", "none"])
def test_streamed_samples_are_those_of_the_fetched_files(
    tmp_path: Path, bucket: str, packing: str
) -> None:
    """Each file alone, fetched and tokenised as usual, has the same samples."""
    data = prepare_data(build_streamed(tmp_path, bucket, packing=packing, length=16))
    start = num_supervised = 0
    for number in range(NUM_FILES):
        recipe = build_streamed(
            tmp_path, f"{bucket}/part-{number}.jsonl", packing=packing, length=16
        )
        whole = recipe.model_copy(
            update={"data": recipe.data.model_copy(update={"streaming": None})}
        )
        fetched = prepare_data(whole).train
        num_supervised += fetched.num_supervised
        for index in range(len(fetched)):
            if packing == "windows":  # every epoch starts the windows at another token
                continue
            streamed = data.train.get_sample(start + index)
            expected = fetched.get_sample(index)
            assert all(
                a is b or np.array_equal(a, b)
                for a, b in zip(streamed, expected, strict=True)
                if not isinstance(a, int)
            )
            assert data.train.count_used_positions(start + index) == fetched.count_used_positions(
                index
            )
        start += len(fetched)
    assert (start, num_supervised) == (len(data.train), data.train.num_supervised)


def test_a_resumed_run_reads_the_same_samples_on_another_machine(
    tmp_path: Path, bucket: str
) -> None:
    first = prepare_data(build_streamed(tmp_path / "a", bucket))
    undisturbed = read_positions(first, range(3 * len(first.train)))
    other = prepare_data(build_streamed(tmp_path / "b", bucket))
    assert other.content_hash == first.content_hash
    for start in (0, 1, len(first.train) - 1, len(first.train) + 77, 2 * len(first.train) + 5):
        assert read_positions(other, range(start, start + 20)) == undisturbed[start : start + 20]


def test_the_index_is_built_once_and_survives_the_removal_of_shards(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = build_streamed(tmp_path, bucket)
    assert not is_prepared(recipe)
    prepare_data(recipe)
    assert is_prepared(recipe)

    def refuse(*_: Any) -> None:
        raise AssertionError("a file was read again")

    monkeypatch.setattr("shardwright.data.streaming.shard_listing.SourceShard.fetch", refuse)
    assert len(prepare_data(recipe).train) > 0


def test_the_order_shuffles_windows_of_shards() -> None:
    order = ShardOrder(seed=3, num_samples_of_shard=(5, 0, 7, 2, 9, 4), window_shards=2)
    starts = order.starts
    epochs = []
    for epoch in (0, 1):
        windows: list[set[int]] = []
        epoch_order = order.get_epoch_order(epoch)
        assert 1 not in epoch_order.shards
        epochs.append(epoch_order.shards)
        for position in range(epoch * 27, epoch * 27 + 27):
            index = order.get_index(position)
            shard = max(n for n in (0, 2, 3, 4, 5) if starts[n] <= index)
            rank = int(np.searchsorted(epoch_order.ends, position - epoch * 27, side="right"))
            assert epoch_order.window_of_shard[shard] == rank // 2
            if len(windows) <= rank // 2:
                windows.append(set())
            windows[-1].add(shard)
        assert [len(window) for window in windows] == [2, 2, 1]
        first = [order.get_index(position) for position in range(epoch * 27, epoch * 27 + 10)]
        in_file_order = sorted(
            first,
            key=lambda index: epoch_order.shards.index(
                max(n for n in (0, 2, 3, 4, 5) if starts[n] <= index)
            ),
        )
        assert first != in_file_order  # the samples of a window are shuffled together
    assert epochs[0] != epochs[1]
    other = ShardOrder(seed=4, num_samples_of_shard=(5, 0, 7, 2, 9, 4), window_shards=2)
    assert [order.get_index(at) for at in range(27)] != [other.get_index(at) for at in range(27)]


def test_weighted_sources_keep_their_shares_in_every_step(tmp_path: Path, bucket: str) -> None:
    sources = [
        {"path": bucket, "glob": "part-[012].jsonl", "weight": 3},
        {"path": bucket, "glob": "part-[345].jsonl", "weight": 1},
    ]
    data = prepare_data(build_streamed(tmp_path, sources, 120_000))
    order = build_order(data, batch=8)
    boundary = sum(
        count
        for count in data.train.parts[0].order.num_samples_of_shard  # type: ignore[attr-defined]
    )
    for step in range(40):
        parts = Counter(order.get_index(at) < boundary for at in range(8 * step, 8 * step + 8))
        assert parts == {True: 6, False: 2}
    assert [source.share for source in data.report.sources] == [0.75, 0.25]
    passes = [order.get_index(at) for at in range(8 * 40) if order.get_index(at) < boundary]
    assert len(set(passes)) == min(len(passes), boundary)


def test_the_next_window_is_read_ahead(tmp_path: Path, bucket: str) -> None:
    data = prepare_data(build_streamed(tmp_path, bucket, 200_000))
    shards = tmp_path / "cache" / "streamed" / "shards"
    for folder in shards.iterdir():
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    order = build_order(data)
    data.train.get_sample(order.get_index(0), 0)
    for _ in range(200):
        if len([path for path in shards.iterdir() if path.suffix != ".partial"]) == 3:
            break
        time.sleep(0.05)
    # The shard of the sample, and the two of the next window.
    assert len(list(shards.iterdir())) == 3


def test_validation_leaves_out_documents_of_the_training_data(tmp_path: Path, bucket: str) -> None:
    texts = [story(2003), story(999_001), story(1), story(999_002)]
    validation = write_json_lines(tmp_path / "validation.jsonl", texts)
    data = prepare_data(build_streamed(tmp_path, bucket, validation=validation))
    assert data.report.num_duplicates_dropped == 2
    assert data.validation is not None
    shown = "".join(
        data.tokenizer.decode(data.validation.get_sample(index).input_ids.tolist())
        for index in range(len(data.validation))
    )
    assert story(999_001)[:40] in shown
    assert story(2003)[:40] not in shown


def test_records_of_conversations_are_streamed(tmp_path: Path) -> None:
    for number in range(3):
        rows = [
            {"prompt": f"How much is {number} + {n}?", "response": f"{number + n}."}
            for n in range(20)
        ]
        path = tmp_path / "set" / f"part-{number}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = prepare_data(build_streamed(tmp_path, str(tmp_path / "set"), length=64))
    assert data.report.packing == "documents"
    assert data.report.sources[0].num_documents == 60
    sample = data.train.get_sample(0)
    assert 0 < np.count_nonzero(sample.labels != -100) < 64


@pytest.mark.parametrize(
    ("options", "field", "text"),
    [
        ({"limit": 3_000}, "data.streaming.cache_bytes", "a shard does not fit"),
        ({"limit": 15_000, "window": 3}, "data.streaming.cache_bytes", "too small for windows"),
        ({"limit": 0}, "data.streaming.cache_bytes", "greater than 0"),
        ({"validation_fraction": 0.1}, "data", "set `validation`"),
        ({"length": 100_000}, "data.sources", "no samples"),
    ],
)
def test_wrong_settings_are_refused(
    tmp_path: Path, bucket: str, options: dict[str, Any], field: str, text: str
) -> None:
    with pytest.raises(InputError) as error:
        prepare_data(build_streamed(tmp_path, bucket, **options))
    assert field in str(error.value)
    assert text in str(error.value)


def test_a_tokenizer_is_not_trained_on_streamed_sources(tmp_path: Path, bucket: str) -> None:
    recipe = build_recipe(tmp_path, bucket, streaming={"cache_bytes": 10_000})
    with pytest.raises(InputError, match=r"tokenizer\.kind"):
        prepare_data(recipe)


def test_a_file_that_changes_during_the_run_is_an_error(tmp_path: Path, bucket: str) -> None:
    data = prepare_data(build_streamed(tmp_path, bucket, 20_000))
    store = fsspec.filesystem("memory")
    for number in range(NUM_FILES):
        store.pipe(f"/bucket/set/part-{number}.jsonl", b'{"text": "other"}\n' * 400)
    with pytest.raises(DataError, match="gives other tokens than when it was indexed"):
        read_positions(data, range(len(data.train)))


def test_a_truncated_answer_is_an_error(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(fsspec.filesystem("memory"))
    read = kind.cat_file

    def read_less(store: Any, path: str, **options: Any) -> bytes:
        content = bytes(read(store, path, **options))
        return content[:-7] if path.endswith("part-3.jsonl") else content

    monkeypatch.setattr(kind, "cat_file", read_less)
    with pytest.raises(DataError, match=r"shorter than its store reported.*part-3\.jsonl"):
        prepare_data(build_streamed(tmp_path, bucket, 20_000))


def build_file(num_bytes: int) -> Any:
    def build(folder: Path, reservation: Reservation) -> None:
        reservation.grow_to(num_bytes)
        (folder / "content").write_bytes(b"x" * num_bytes)

    return build


def release_nothing() -> None:
    pass


def test_bytes_are_reserved_before_they_are_written(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Reservation.grow_to
    checked = []

    def check(reservation: Reservation, num_bytes: int) -> None:
        if reservation.num_bytes:
            partial = next((tmp_path / "cache/streamed/shards").glob("*.partial"))
            written = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
            checked.append(written <= reservation.num_bytes)
        original(reservation, num_bytes)

    monkeypatch.setattr(Reservation, "grow_to", check)
    prepare_data(build_streamed(tmp_path, bucket))
    assert len(checked) > NUM_FILES
    assert all(checked)


def test_a_cache_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"data\.cache_dir: .* cannot be created"):
        ShardCache(tmp_path / "file" / "streamed", 100)


def test_the_cache_removes_the_shard_that_was_used_first(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 100)
    for key in ("a", "b"):
        cache.find_or_build(key, 0, build_file(40), release_nothing).release()
    os.utime(tmp_path / "shards" / "b", (1, 1))
    cache.find_or_build("c", 0, build_file(40), release_nothing).release()
    assert sorted(path.name for path in (tmp_path / "shards").iterdir()) == ["a", "c"]
    assert cache.count_bytes() == 80


def test_a_shard_in_use_is_never_removed(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 100)
    lease = cache.find_or_build("a", 0, build_file(60), release_nothing)
    other = ShardCache(tmp_path, 100)  # as another run
    assert not other.build_ahead("b", 60, build_file(60))
    assert (lease.folder / "content").stat().st_size == 60
    threading.Timer(0.2, lease.release).start()
    other.find_or_build("b", 60, build_file(60), release_nothing).release()
    assert not lease.folder.exists()


def test_a_caller_without_space_releases_its_own_shards(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 100)
    lease = cache.find_or_build("a", 0, build_file(60), release_nothing)
    cache.find_or_build("b", 60, build_file(60), lease.release).release()
    assert cache.count_bytes() == 60


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 100)

    def fail(folder: Path, reservation: Reservation) -> None:
        build_file(50)(folder, reservation)
        raise DataError("broken", field="data.sources")

    with pytest.raises(DataError, match="broken"):
        cache.find_or_build("a", 0, fail, release_nothing)
    assert cache.count_bytes() == 0
    assert not list((tmp_path / "shards").iterdir())
    assert not list((tmp_path / "reservations").iterdir())


def test_a_killed_builder_leaves_no_lock_and_no_bytes(tmp_path: Path) -> None:
    def die(folder: Path, reservation: Reservation) -> None:
        build_file(50)(folder, reservation)
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        ShardCache(tmp_path, 100).find_or_build("a", 0, die, release_nothing)
    os.waitpid(child, 0)
    assert list((tmp_path / "shards").glob("a.*.partial"))
    cache = ShardCache(tmp_path, 100)
    cache.find_or_build("b", 100, build_file(100), release_nothing).release()
    assert [path.name for path in (tmp_path / "shards").iterdir()] == ["b"]


def test_growth_beyond_the_free_space_is_reported_as_full(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 100)
    lease = cache.find_or_build("a", 0, build_file(60), release_nothing)
    with cache._open_reservation() as reservation:
        reservation.grow_to(30)
        with pytest.raises(CacheFull):
            reservation.grow_to(50)
    lease.release()
