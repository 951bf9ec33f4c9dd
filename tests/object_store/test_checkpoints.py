"""Checkpoints in a real S3 server: saved, resumed, and after every kind of failing request."""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shardwright.checkpoint import object_upload
from shardwright.checkpoint.commit import (
    RetentionPolicy,
    check_store,
    list_step_folders,
    read_pointer,
)
from shardwright.checkpoint.integrity import verify_checkpoint
from shardwright.checkpoint.local_tensors import ParameterShard
from shardwright.checkpoint.storage_path import RemotePath, parse_storage_path
from shardwright.checkpoint.tensor_loading import find_newest_checkpoint, load_checkpoint
from shardwright.checkpoint.tensor_saving import save_checkpoint
from shardwright.cli.main import run
from shardwright.errors import CheckpointError, SaveFailed
from shardwright.layout import ParameterBox
from shardwright.store_requests import NUM_ATTEMPTS
from tests import forked
from tests.object_store.conftest import ROOT, SECRET_KEY, Server, get_client
from tests.object_store.proxy import Request
from tests.unit.checkpoint.conftest import make_tensors

URL = "s3://bucket/run"


def save(step: int, **options: Any) -> None:
    save_checkpoint(URL, step, make_tensors(), {"step": step}, **options)


def open_root() -> RemotePath:
    root = parse_storage_path(URL)
    assert isinstance(root, RemotePath)
    return root


def load_newest() -> int:
    """Load the newest checkpoint, compare every element, and return its step."""
    newest = find_newest_checkpoint(URL)
    assert newest is not None
    tensors = {name: torch.zeros_like(tensor) for name, tensor in make_tensors().items()}
    assert load_checkpoint(newest, tensors) == {"step": newest.step}
    assert all(torch.equal(tensors[name], tensor) for name, tensor in make_tensors().items())
    return newest.step


def test_saves_are_pruned_and_read_back(
    store: Server, count_objects: Callable[[], list[str]]
) -> None:
    for step in (1, 2, 3, 4):
        save(step, retention=RetentionPolicy(1), is_best=step == 1)
    save(4, retention=RetentionPolicy(1))
    assert [folder.path.name for folder in list_step_folders(open_root())] == [
        "step-00000001",
        "step-00000004.1",
    ]
    assert load_newest() == 4
    names = [name.removeprefix("bucket/run/") for name in count_objects()]
    files = ("manifest.json", "manifest.sha256", "shard-00000.safetensors", "values.json")
    assert names == [
        "best",
        "latest",
        *[f"{folder}/{name}" for folder in ("step-00000001", "step-00000004.1") for name in files],
    ]


def test_a_missing_bucket_is_one_error_and_is_not_created(store: Server) -> None:
    root = parse_storage_path("s3://misspelled/run")
    with pytest.raises(CheckpointError, match="bucket does not exist") as raised:
        check_store(root)
    assert raised.value.got == "s3://misspelled/run"
    assert len(store.proxy.requests) == 1, "a final error is not retried"
    assert get_client().call_s3("list_buckets")["Buckets"][0]["Name"] == "bucket"


def test_the_checkpoint_verbs_report_a_store_that_refuses(
    store: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    save(1)
    store.proxy.fault = lambda request: 403
    for verb in ("list", "verify", "inspect"):
        assert run(["checkpoint", verb, URL]) == 2
        assert "PATH: cannot be read: PermissionError" in capsys.readouterr().err


@pytest.mark.parametrize("credentials", ["unknown key", "wrong secret", "no permission", "none"])
def test_wrong_credentials_are_one_error_before_training(
    store: Server, credentials: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    import boto3

    iam = boto3.client("iam")
    iam.create_user(UserName="someone")
    key = iam.create_access_key(UserName="someone")["AccessKey"]
    if credentials != "no permission":
        policy = '{"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": "s3:*",'
        policy += ' "Resource": "*"}}'
        iam.put_user_policy(UserName="someone", PolicyName="all", PolicyDocument=policy)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    store.post("/moto-api/reset-auth", b"0")
    try:
        if credentials != "no permission":
            open_again()
            check_store(open_root())  # with the right ones
        if credentials == "unknown key":
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIANOBODYNOBODYNOBO")
        elif credentials == "wrong secret":
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        elif credentials == "none":
            monkeypatch.delenv("AWS_ACCESS_KEY_ID")
            monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        open_again()
        store.proxy.forget()
        with pytest.raises(CheckpointError, match="cannot be written here") as raised:
            check_store(open_root())
    finally:
        store.post("/moto-api/reset-auth", b"inf")
    assert raised.value.field == "checkpoint.dir"
    assert SECRET_KEY not in str(raised.value)
    assert len(store.proxy.requests) <= 1, "a final error is not retried"
    assert not caplog.records


def open_again() -> None:
    """Let the next client read the credentials again."""
    type(get_client()).clear_instance_cache()


@pytest.mark.parametrize("fault", [500, pytest.param(503, marks=pytest.mark.long), "reset", "lost"])
def test_every_request_may_fail_at_first(
    store: Server, fault: int | str, caplog: pytest.LogCaptureFixture
) -> None:
    failed: Counter[tuple[str, str, str]] = Counter()

    def fail_first(request: Request) -> int | str | None:
        name = (request.method, request.key, request.byte_range + "".join(sorted(request.query)))
        failed[name] += 1
        # The client itself repeats a request once whose connection was closed.
        return fault if failed[name] <= (2 if isinstance(fault, str) else 1) else None

    save(1)
    store.proxy.fault = fail_first
    save(2, retention=RetentionPolicy(1))
    assert load_newest() == 2
    assert len(failed) > 15
    assert "attempt 2 of 10 follows" in caplog.text
    store.proxy.fault = lambda request: None
    assert [folder.step for folder in list_step_folders(open_root())] == [2]


def test_a_store_that_stays_down_fails_the_save_after_a_bounded_number_of_attempts(
    store: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwright.store_requests.MAX_DELAY_SECONDS", 0.02)
    save(1)
    store.proxy.forget()
    store.proxy.fault = lambda request: 503 if request.key.endswith("values.json") else None
    with pytest.raises(SaveFailed, match=r"older checkpoints in .* are intact.*SlowDown"):
        save(2)
    attempts = [request for request in store.proxy.requests if request.key.endswith("values.json")]
    assert len([each for each in attempts if each.method == "PUT"]) == NUM_ATTEMPTS
    store.proxy.fault = lambda request: (
        503 if request.byte_range and "shard" in request.key else None
    )
    with pytest.raises(CheckpointError, match="It may be intact"):
        find_newest_checkpoint(URL)
    store.proxy.forget()
    assert load_newest() == 1


def test_slow_requests_time_out_and_are_sent_again(
    store: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(
        __import__("fsspec").config.conf, "s3", {"config_kwargs": {"read_timeout": 0.5}}
    )
    slow: list[Request] = []

    def delay_once(request: Request) -> float | None:
        if slow or not request.key.endswith("manifest.json") or request.method != "PUT":
            return None
        slow.append(request)
        return 1.0

    store.proxy.fault = delay_once
    save(1)
    assert load_newest() == 1
    assert "ReadTimeoutError" in caplog.text


def test_a_truncated_object_is_named_and_the_previous_checkpoint_is_used(store: Server) -> None:
    for step in (1, 2):
        save(step)
    client = get_client()
    shard = "bucket/run/step-00000002/shard-00000.safetensors"
    data = client.cat_file(shard)
    client.pipe_file(shard, data[:-1])
    faults = verify_checkpoint(open_root() / "step-00000002")[1]
    assert faults == [
        f"shard-00000.safetensors has {len(data) - 1} bytes, but {len(data)} were written"
    ]
    client.pipe_file(shard, data[:-1] + b"\0")
    assert "SHA-256" in str(verify_checkpoint(open_root() / "step-00000002")[1])
    assert load_newest() == 1


def test_large_files_are_uploaded_in_parallel_parts_and_read_by_ranges(
    store: Server, monkeypatch: pytest.MonkeyPatch, count_objects: Callable[[], list[str]]
) -> None:
    part_bytes = 5 * 1024**2  # S3's minimum
    monkeypatch.setattr(object_upload, "BLOCK_BYTES", part_bytes)
    tensors = {"a": torch.arange(6 * 1024**2, dtype=torch.int32).view(1024, -1), "b": torch.ones(7)}
    save_checkpoint(URL, 1, tensors, {})
    parts = [request for request in store.proxy.requests if "partNumber" in request.query]
    assert sorted(int(each.query["partNumber"][0]) for each in parts) == [1, 2, 3, 4, 5]
    newest = find_newest_checkpoint(URL)
    assert newest is not None
    shard = newest.manifest.files["shard-00000.safetensors"]
    header_bytes = shard.size_bytes - 24 * 1024**2 - 28
    assert store.proxy.count_read_bytes("shard-00000.safetensors") == (
        shard.size_bytes + header_bytes
    ), "hashed once, and the header read"
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    store.proxy.forget()
    load_checkpoint(newest, loaded)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert store.proxy.count_read_bytes("shard-00000.safetensors") == shard.size_bytes

    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    store.proxy.forget()
    newest = find_newest_checkpoint(URL, should_cache=True)
    assert newest is not None
    load_checkpoint(newest, loaded)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert store.proxy.count_read_bytes("shard-00000.safetensors") == shard.size_bytes, "once"
    assert newest.cache is not None
    assert not newest.cache.blocks, "the memory is free again"

    store.proxy.forget()
    store.proxy.fault = lambda request: 403 if request.query.get("partNumber") == ["3"] else None
    with pytest.raises(SaveFailed, match="AccessDenied"):
        save_checkpoint(URL, 2, tensors, {})
    store.proxy.forget()
    assert not [name for name in count_objects() if "step-00000002" in name]
    uploads = get_client().call_s3("list_multipart_uploads", Bucket="bucket")
    assert not uploads.get("Uploads"), "the upload was aborted"


def test_a_lost_answer_to_the_end_of_an_upload_is_no_failure(
    store: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_upload, "BLOCK_BYTES", 5 * 1024**2)
    seen: list[Request] = []

    def lose_once(request: Request) -> str | int | None:
        if request.method != "POST" or "uploadId" not in request.query:
            return None
        seen.append(request)
        return "lost" if len(seen) == 1 else 404

    store.proxy.fault = lose_once
    tensors = {"a": torch.arange(3 * 1024**2, dtype=torch.int32)}
    save_checkpoint(URL, 1, tensors, {})
    assert len(seen) == 2
    assert verify_checkpoint(open_root() / "step-00000001")[1] == []


def test_slices_are_read_without_their_neighbours(store: Server) -> None:
    whole = torch.arange(64 * 1024, dtype=torch.float32).view(64, 1024)
    save_checkpoint(URL, 1, {"w": whole}, {})
    newest = find_newest_checkpoint(URL)
    assert newest is not None
    part = torch.zeros(8, 1024)
    box = ParameterBox(((0, 8), (0, 1024)), ((16, 8), (0, 1024)))
    store.proxy.forget()
    load_checkpoint(newest, {"w": ParameterShard(part, (64, 1024), (box,))})
    assert torch.equal(part, whole[16:24])
    header_bytes = newest.manifest.files["shard-00000.safetensors"].size_bytes - whole.nbytes
    read_bytes = store.proxy.count_read_bytes("shard-00000.safetensors")
    assert read_bytes == part.nbytes + header_bytes


def test_the_server_restarts_in_the_middle_of_a_save(
    store: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(1)
    client = get_client()
    objects = {name: client.cat_file(name) for name in client.find("bucket")}
    restarted = threading.Event()

    def restart(request: Request) -> None:
        if request.method != "PUT" or not request.key.endswith("values.json") or restarted.is_set():
            return
        restarted.set()
        store.kill()
        threading.Thread(target=start_later).start()

    def start_later() -> None:
        time.sleep(0.5)
        store.proxy.fault = lambda request: 503  # until the disk is back
        store.start_again()
        store.proxy.fault = lambda request: None
        client.call_s3("create_bucket", Bucket="bucket")
        for name, content in objects.items():
            client.pipe_file(name, content)

    monkeypatch.setattr("shardwright.store_requests.FIRST_DELAY_SECONDS", 0.25)
    store.proxy.fault = restart
    try:
        save(2)
        is_saved = True
    except SaveFailed:  # objects that the dead server had in memory only
        is_saved = False
    assert restarted.is_set()
    assert load_newest() in ((2, 1) if is_saved else (1,))
    save(3)
    assert load_newest() == 3


def test_lagging_listings_lose_and_invent_nothing(store: Server) -> None:
    store.proxy.freeze_listings()  # the bucket looks empty from now on
    save(1)
    assert load_newest() == 1
    save(2, retention=RetentionPolicy(1))
    assert load_newest() == 2
    save(2)  # must not overwrite the first attempt
    latest = read_pointer(open_root(), "latest")
    assert latest is not None
    assert latest.path.name == "step-00000002.1"
    assert load_newest() == 2
    store.proxy.frozen_sizes = None
    names = [folder.path.name for folder in list_step_folders(open_root())]
    assert names == ["step-00000001", "step-00000002", "step-00000002.1"]

    store.proxy.freeze_listings()  # and now it looks as if nothing were removed
    save(3, retention=RetentionPolicy(1))
    assert [folder.step for folder in list_step_folders(open_root())] == [3]
    assert load_newest() == 3


def test_a_hidden_checkpoint_that_latest_does_not_name_is_not_overwritten(store: Server) -> None:
    store.proxy.freeze_listings()
    save(1)
    save(2)
    # As if the process had died before it moved the pointer.
    get_client().pipe_file("bucket/run/latest", b"step-00000001\n")
    save(2)
    latest = read_pointer(open_root(), "latest")
    assert latest is not None
    assert latest.path.name == "step-00000002.1"


def test_remains_that_a_lagging_listing_hid_do_not_damage_a_checkpoint(store: Server) -> None:
    store.proxy.freeze_listings()
    get_client().pipe_file("bucket/run/step-00000001/shard-00001.safetensors", b"of a dead save")
    save(1)
    store.proxy.frozen_sizes = None
    assert verify_checkpoint(open_root() / "step-00000001")[1] == []
    assert load_newest() == 1


@pytest.fixture
def saver(store: Server) -> Iterator[forked.Popen]:
    """Start a program that saves in forks."""
    program = forked.Popen(
        [sys.executable, "-m", "tests.object_store.saver"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    yield program
    program.kill()
    program.communicate()


def kill_save_at(store: Server, saver: forked.Popen, number: int) -> bool:
    """Save steps 1 and 2; save step 3 in another process and kill it at its n-th request.

    Returns:
        True if the save was killed, False if it ended before.
    """
    assert saver.stdin is not None
    assert saver.stdout is not None
    store.proxy.forget()
    store.post("/moto-api/reset")
    store.proxy.sizes.clear()
    get_client().call_s3("create_bucket", Bucket="bucket")
    save(1, is_best=True)
    save(2)
    store.proxy.forget()
    process_ids: queue.Queue[int] = queue.Queue()

    def kill(request: Request) -> None:
        if request.number == number:
            os.kill(process_ids.get(), signal.SIGKILL)

    store.proxy.fault = kill
    saver.stdin.write(f"{URL}\n")
    saver.stdin.flush()
    process_ids.put(int(saver.stdout.readline()))
    outcome = saver.stdout.readline().strip()
    store.proxy.fault = lambda request: None
    assert outcome in ("killed", "0")
    return outcome == "killed"


def check_after_kill(count_objects: Callable[[], list[str]]) -> int:
    newest = load_newest()
    assert newest in (2, 3)
    for folder in list_step_folders(open_root()):
        assert verify_checkpoint(folder.path)[1] == [], "a half checkpoint looks whole"
    save(4, retention=RetentionPolicy(1))
    assert load_newest() == 4
    folders = {name.split("/")[2] for name in count_objects() if name.count("/") > 2}
    assert folders == {"step-00000001", "step-00000004"}
    return newest


@pytest.mark.parametrize("number", [3, 12, 21])
def test_a_save_killed_at_a_request_leaves_a_whole_checkpoint(
    store: Server,
    saver: forked.Popen,
    number: int,
    count_objects: Callable[[], list[str]],
) -> None:
    assert kill_save_at(store, saver, number)
    check_after_kill(count_objects)


@pytest.mark.long
def test_a_save_killed_at_any_request_leaves_a_whole_checkpoint(
    store: Server, saver: forked.Popen, count_objects: Callable[[], list[str]]
) -> None:
    number = 0
    newest = []
    while kill_save_at(store, saver, number + 1):
        number += 1
        newest.append(check_after_kill(count_objects))
    logging.getLogger(__name__).warning("killed at %d requests: %s", number, newest)
    assert number > 25
    assert set(newest) == {2, 3}
