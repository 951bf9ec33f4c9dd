"""The cache builds each folder once among processes; an incomplete folder is never used."""

from __future__ import annotations

import errno
import logging
import os
import pwd
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest

from shardwright.config.data import DataSource
from shardwright.data import data_cache
from shardwright.data.data_cache import build_once, find_cache_root, fingerprint_files
from shardwright.data.sources.file_listing import list_files
from shardwright.errors import DataError
from tests.unit.data.recipes import write_text


def write_answer(folder: Path) -> None:
    (folder / "answer").write_text("42")


def list_names(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*"))


def test_a_folder_is_built_once_and_reused(tmp_path: Path) -> None:
    calls = []

    def build(folder: Path) -> None:
        calls.append(folder)
        write_answer(folder)

    for _ in range(2):
        assert (build_once(tmp_path, "tokens/key", build) / "answer").read_text() == "42"
    assert len(calls) == 1
    assert list_names(tmp_path) == ["answer", "key", "tokens"]


def test_a_failed_build_leaves_no_files_and_may_be_repeated(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        write_answer(folder)
        raise DataError("broken")

    with pytest.raises(DataError, match="broken"):
        build_once(tmp_path, "key", build)
    assert list_names(tmp_path) == []
    build_once(tmp_path, "key", write_answer)


def test_a_full_disk_is_reported_with_a_remedy(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        write_answer(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "answer"))

    with pytest.raises(DataError, match=r"data\.cache_dir: .*No space left on device.*Free space"):
        build_once(tmp_path, "key", build)
    assert list_names(tmp_path) == []


def test_a_url_in_the_environment_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", "s3://bucket/cache")
    with pytest.raises(DataError, match=r"SHARDWRIGHT_CACHE: .*got s3://bucket/cache; allowed"):
        find_cache_root(None)


def test_an_unwritable_cache_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"data\.cache_dir"):
        build_once(tmp_path / "file", "key", write_answer)


BUILDER = """
import sys, time
from pathlib import Path
from typing import NoReturn
from shardwright.data.data_cache import build_once

root = Path(sys.argv[1])

def build(folder):
    with open(root / "calls", "a") as stream:
        stream.write("x")
    time.sleep(0.5)
    (folder / "answer").write_text("42")

print((build_once(root, "key", build, poll_seconds=0.01) / "answer").read_text())
"""


def test_one_of_several_processes_builds_and_the_others_wait(tmp_path: Path) -> None:
    builders = [
        subprocess.Popen(
            [sys.executable, "-c", BUILDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    assert [builder.communicate(timeout=250)[0].strip() for builder in builders] == ["42"] * 4
    assert (tmp_path / "calls").read_text() == "x"
    assert list_names(tmp_path) == ["answer", "calls", "key"]


def test_a_killed_process_does_not_block_the_others(tmp_path: Path) -> None:
    builder = subprocess.Popen([sys.executable, "-c", BUILDER.replace("0.5", "600"), str(tmp_path)])
    while not (tmp_path / "calls").exists():
        time.sleep(0.01)
    builder.kill()
    builder.wait()
    assert any(name.endswith(".partial") for name in list_names(tmp_path))
    started = time.monotonic()
    build_once(tmp_path, "key", write_answer)
    assert time.monotonic() - started < 30  # not the ten minutes that the build takes
    assert list_names(tmp_path) == ["answer", "calls", "key"]


def test_a_stale_lock_of_another_machine_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_cache, "STALE_SECONDS", 0.3)
    # Containers of two nodes may have the same host name, and a process number means another one.
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    (tmp_path / "key.lock").write_text(f"{socket.gethostname()} {killed.pid} abcd")
    started = time.monotonic()
    build_once(tmp_path, "key", write_answer, poll_seconds=0.01)
    assert time.monotonic() - started > 0.25
    assert list_names(tmp_path) == ["answer", "key"]


def test_replacing_a_lock_removes_only_the_partial_folder_of_its_owner(tmp_path: Path) -> None:
    """Two processes may replace the lock of a killed one.

    The second removes the partial folder of the killed process only.
    """
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    (tmp_path / "key.lock").write_text(f"{data_cache.identify_machine()} {killed.pid} dead")
    for name in ("dead", "alive"):
        (tmp_path / f"key.{name}.partial").mkdir()
    build_once(tmp_path, "key", write_answer)
    assert list_names(tmp_path) == ["answer", "key", "key.alive.partial"]


class Clock:
    """The module `time` with a monotonic clock that the test sets; `num_sleeps` counts sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_sleeps = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.num_sleeps += 1
        time.sleep(seconds)


def test_a_lock_with_heartbeats_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    lock = tmp_path / "key.lock"
    order = list[str]()
    monkeypatch.setattr(data_cache, "STALE_SECONDS", 3.0)
    monkeypatch.setattr(data_cache, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(data_cache, "time", clock)

    def build_slowly(folder: Path) -> None:
        for _ in range(4):
            touched = lock.stat().st_mtime_ns
            while lock.stat().st_mtime_ns == touched:
                time.sleep(0.01)
            num_sleeps = clock.num_sleeps
            while clock.num_sleeps < num_sleeps + 2:  # the second poll begins after the touch
                time.sleep(0.01)
            clock.now += 2.0
        order.append("slow")
        write_answer(folder)

    worker = threading.Thread(target=build_once, args=(tmp_path, "key", build_slowly))
    worker.start()
    while not lock.exists():
        time.sleep(0.01)
    build_once(tmp_path, "key", lambda folder: order.append("second"), poll_seconds=0.01)
    worker.join()
    assert order == ["slow"]


def test_fingerprints_depend_on_content_and_names(tmp_path: Path) -> None:
    def compute_fingerprints() -> list[list[str]]:
        return fingerprint_files(
            list_files([DataSource(path=str(tmp_path / "in"))], "data.sources"), tmp_path / "cache"
        )

    write_text(tmp_path / "in" / "a.txt", "one")
    first = compute_fingerprints()
    os.utime(tmp_path / "in" / "a.txt", ns=(0, 1))  # touched, not changed
    assert compute_fingerprints() == first
    write_text(tmp_path / "in" / "a.txt", "two")
    assert compute_fingerprints() != first
    write_text(tmp_path / "in" / "a.txt", "one")
    assert compute_fingerprints() == first
    (tmp_path / "in" / "a.txt").rename(tmp_path / "in" / "b.txt")
    assert compute_fingerprints() != first, "names determine the order of documents"


def test_settled_files_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(write_text(tmp_path / "a.txt", "one"))
    files = list_files([DataSource(path=str(path))], "data.sources")
    hashed = []
    monkeypatch.setattr(data_cache, "_SETTLED_SECONDS", 3600.0)
    monkeypatch.setattr(data_cache, "_hash_file", lambda path: hashed.append(path) or "digest")
    for _ in range(2):  # changed just now: it may change again within the clock's resolution
        fingerprint_files(files, tmp_path / "cache")
    assert len(hashed) == 2
    os.utime(path, (1, 1))
    for _ in range(3):
        fingerprint_files(files, tmp_path / "cache")
    assert len(hashed) == 3


def test_the_cache_folder_comes_from_argument_environment_or_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert find_cache_root(str(tmp_path)) == tmp_path
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "all"))
    assert find_cache_root(None) == tmp_path / "all" / "data"
    monkeypatch.delenv("SHARDWRIGHT_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_cache_root(None) == tmp_path / ".cache" / "shardwright" / "data"


def test_a_user_without_a_home_has_a_cache_among_temporary_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def find_no_account(_user: int) -> NoReturn:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.delenv("SHARDWRIGHT_CACHE", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", find_no_account)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="shardwright"):
        for _ in range(2):
            assert find_cache_root(None) == tmp_path / f"shardwright-cache-{os.getuid()}" / "data"
    assert [message for message in caplog.messages if message.startswith("HOME")] == [
        f"HOME is not set and user {os.getuid()} has no account, so caches are in "
        f"{tmp_path}/shardwright-cache-{os.getuid()}; set SHARDWRIGHT_CACHE to a folder that stays"
    ]
