"""Heartbeat files, limits learned from the first steps, and the monitor that acts on them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwright.config.run import WatchdogSection
from shardwright.errors import InputError
from shardwright.watchdog.heartbeat import (
    _NUM_RING_RECORDS,
    HeartbeatWriter,
    build_channel,
    read_heartbeat,
)
from shardwright.watchdog.monitor import PhaseLimits, Watchdog, get_shared_folder, read_heartbeats
from tests.unit.watchdog.nccl_dumps import TENSOR, Recorder


@pytest.fixture
def heartbeat(tmp_path: Path) -> Iterator[HeartbeatWriter]:
    writer = HeartbeatWriter(tmp_path, 0, 2)
    yield writer
    writer.close()


def test_a_heartbeat_is_read_as_written(tmp_path: Path, heartbeat: HeartbeatWriter) -> None:
    channel = build_channel("0", (0, 1))
    heartbeat.begin_phase("step", 12.5, step=7)
    heartbeat.record_collective(channel, 1, 64)
    heartbeat.record_wait(is_waiting=True)
    view = read_heartbeat(tmp_path / "rank-0.pulse")
    assert view is not None
    assert (view.rank, view.pid, view.world_size, view.phase, view.step, view.limit_seconds) == (
        0,
        os.getpid(),
        2,
        "step",
        7,
        12.5,
    )
    assert 0 <= time.monotonic() - view.phase_start_seconds < 60
    assert view.wait_start_seconds is not None
    assert str(view.find_last_entry(channel.key)) == "all_reduce #1 (64 elements)"
    assert view.channels == {channel.key: channel}


def test_the_ring_buffer_holds_the_newest_entries(
    tmp_path: Path, heartbeat: HeartbeatWriter
) -> None:
    channel = build_channel("0", (0, 1))
    for _ in range(_NUM_RING_RECORDS + 5):
        heartbeat.record_collective(channel, 1, 1)
    view = read_heartbeat(tmp_path / "rank-0.pulse")
    assert view is not None
    assert [entry.sequence_number for entry in view.entries] == list(
        range(6, _NUM_RING_RECORDS + 6)
    )


def test_a_second_process_of_a_rank_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    code = """
import pathlib, sys
from shardwright.watchdog.heartbeat import HeartbeatWriter
HeartbeatWriter(pathlib.Path(sys.argv[1]), 0, 2)
print("up", flush=True)
sys.stdin.read()
"""
    first = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert first.stdin is not None
    assert first.stdout is not None
    assert first.stdout.readline() == b"up\n"
    with pytest.raises(InputError, match=f"two processes have rank 0 .*process {first.pid}"):
        HeartbeatWriter(tmp_path, 0, 2)
    first.kill()
    first.communicate()
    HeartbeatWriter(tmp_path, 0, 2).close()
    assert read_heartbeats(tmp_path) == []


def test_limits_are_learned_from_the_first_steps_between_floor_and_ceiling() -> None:
    limits = PhaseLimits(
        WatchdogSection(factor=10, floor_seconds=2, setup_seconds=50),
        {"step": 100, "save": 1000, "evaluate": 100},
    )
    assert limits.compute_limit_seconds("setup") == 50
    assert limits.compute_limit_seconds("step") == 90
    limits.record("step", 60.0)  # compiles
    for seconds in (0.1, 0.3, 0.2):
        assert limits.compute_limit_seconds("step") == 90
        limits.record("step", seconds)
    assert limits.compute_limit_seconds("step") == pytest.approx(3.0)
    limits.record("step", 0.01)
    assert limits.compute_limit_seconds("step") == pytest.approx(3.0)
    limits.record("step", 20.0)
    assert limits.compute_limit_seconds("step") == 90
    for _ in range(4):
        limits.record("save", 0.001)
    assert limits.compute_limit_seconds("save") == 2


def test_the_monitor_reports_and_kills_a_stopped_rank_and_saves_its_stack(tmp_path: Path) -> None:
    code = """
import pathlib, sys, time
from shardwright.watchdog.heartbeat import HeartbeatWriter
heartbeat = HeartbeatWriter(pathlib.Path(sys.argv[1]), int(sys.argv[2]), 2)
heartbeat.begin_phase("step", 4.0, step=3)
def block_forever():
    print("up", flush=True)
    time.sleep(600)
block_forever()
"""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(rank)], stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    for process in ranks:
        assert process.stdout is not None
        process.stdout.readline()
    ranks[1].send_signal(signal.SIGSTOP)
    os.waitpid(ranks[1].pid, os.WUNTRACED)  # it stops when it is next given a core
    try:
        with Watchdog(tmp_path, tmp_path / "hangs") as watchdog:
            assert ranks[1].wait(timeout=250) == -signal.SIGKILL
        assert watchdog.diagnosis is not None
        assert watchdog.diagnosis.blocking_ranks == (1,)
        (report,) = (tmp_path / "hangs").iterdir()
        assert str(report) in watchdog.diagnosis.message
        assert report.read_text().count("in block_forever") == 2
        assert ranks[0].poll() is None
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_on_cuda_the_monitor_requests_and_uses_the_records_of_nccl(tmp_path: Path) -> None:
    """Both hosts have entered everything; only rank 1's record shows what rank 0 skipped.

    The ranks stand for NCCL's thread: they make the pipe, and write a record when it is written to.
    """
    reports = tmp_path / "hangs"
    code = """
import os, pathlib, sys, time
from shardwright.watchdog.heartbeat import NCCL_PIPE_STEM, HeartbeatWriter
folder, rank = pathlib.Path(sys.argv[1]), int(sys.argv[2])
heartbeat = HeartbeatWriter(folder, rank, 2)
pipe = folder / f"{NCCL_PIPE_STEM}{rank}.pipe"
os.mkfifo(pipe)
reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
heartbeat.begin_phase("step", 1.0 + rank, step=3)
print("up", flush=True)
while not os.read(reader, 128):
    time.sleep(0.05)
time.sleep(1.2)
(folder / f"prepared-{rank}").rename(folder / "hangs" / f"nccl-rank-{rank}")
time.sleep(600)
"""
    for rank in range(2):
        recorder = Recorder(rank)
        recorder.collective(TENSOR, "all_reduce", 8)
        if rank == 1:
            recorder.collective(TENSOR, "all_reduce", 16, "scheduled")
        recorder.write(tmp_path).rename(tmp_path / f"prepared-{rank}")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(rank)], stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            assert process.stdout is not None
            process.stdout.readline()
        with Watchdog(tmp_path, reports) as watchdog:
            assert ranks[0].wait(timeout=120) == -signal.SIGKILL
        assert watchdog.diagnosis is not None
        assert watchdog.diagnosis.blocking_ranks == (0,)
        assert "rank 0 is missing from all_reduce #2 (16 Float elements)" in (
            watchdog.diagnosis.message
        )
        (report,) = reports.glob("hang-*.txt")
        assert "scheduled  all_reduce #2 (16 Float elements) of group tp" in report.read_text()
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_ranks_of_one_launch_share_a_folder_that_the_next_launch_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "0"}
    first = get_shared_folder(launch)
    assert get_shared_folder(launch) == first
    assert get_shared_folder(launch | {"TORCHELASTIC_RESTART_COUNT": "1"}) != first
    assert first.stat().st_mode & 0o77 == 0
