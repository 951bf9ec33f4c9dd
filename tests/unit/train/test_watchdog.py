"""Pulses in a file, limits that are learned, and a watcher that acts on them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwright.config.upkeep import WatchdogSection
from shardwright.errors import InputError
from shardwright.train.pulse import _RING_LENGTH, Pulse, channel_of, read_pulse
from shardwright.train.watchdog import Pace, Watcher, read_pulses, shared_folder


@pytest.fixture
def pulse(tmp_path: Path) -> Iterator[Pulse]:
    made = Pulse(tmp_path, 0, 2)
    yield made
    made.close()


def test_a_pulse_is_read_as_it_was_written(tmp_path: Path, pulse: Pulse) -> None:
    channel = channel_of("0", (0, 1))
    pulse.begin("step", 12.5, step=7)
    pulse.enter(channel, 1, 64)
    pulse.wait(waits=True)
    view = read_pulse(tmp_path / "rank-0.pulse")
    assert view is not None
    assert (view.rank, view.pid, view.world_size, view.phase, view.step, view.limit_seconds) == (0, os.getpid(), 2, "step", 7, 12.5)
    assert 0 <= time.monotonic() - view.since < 60
    assert view.waiting_since is not None
    assert str(view.last_of(channel.key)) == "all_reduce #1 (64 elements)"
    assert view.channels == {channel.key: channel}


def test_the_ring_keeps_the_newest(tmp_path: Path, pulse: Pulse) -> None:
    channel = channel_of("0", (0, 1))
    for _ in range(_RING_LENGTH + 5):
        pulse.enter(channel, 1, 1)
    view = read_pulse(tmp_path / "rank-0.pulse")
    assert view is not None
    assert [entered.number for entered in view.entered] == list(range(6, _RING_LENGTH + 6))


def test_a_second_process_of_a_rank_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    code = """
import pathlib, sys
from shardwright.train.pulse import Pulse
Pulse(pathlib.Path(sys.argv[1]), 0, 2)
print("up", flush=True)
sys.stdin.read()
"""
    first = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdin is not None
    assert first.stdout is not None
    assert first.stdout.readline() == b"up\n"
    with pytest.raises(InputError, match=f"two processes have rank 0 .*process {first.pid}"):
        Pulse(tmp_path, 0, 2)
    first.kill()
    first.communicate()
    Pulse(tmp_path, 0, 2).close()
    assert read_pulses(tmp_path) == []


def test_limits_are_learned_from_the_first_steps_between_floor_and_ceiling() -> None:
    pace = Pace(WatchdogSection(factor=10, floor_seconds=2, setup_seconds=50), {"step": 100, "save": 1000, "evaluate": 100})
    assert pace.limit("setup") == 50
    assert pace.limit("step") == 90
    pace.took("step", 60.0)  # compiles
    for seconds in (0.1, 0.3, 0.2):
        assert pace.limit("step") == 90
        pace.took("step", seconds)
    assert pace.limit("step") == pytest.approx(3.0)
    pace.took("step", 0.01)
    assert pace.limit("step") == pytest.approx(3.0)
    pace.took("step", 20.0)
    assert pace.limit("step") == 90
    for _ in range(4):
        pace.took("save", 0.001)
    assert pace.limit("save") == 2


def test_a_watcher_names_and_kills_a_stopped_rank_and_keeps_its_stack(tmp_path: Path) -> None:
    code = """
import pathlib, sys, time
from shardwright.train.pulse import Pulse
pulse = Pulse(pathlib.Path(sys.argv[1]), int(sys.argv[2]), 2)
pulse.begin("step", 4.0, step=3)
def stand_still():
    print("up", flush=True)
    time.sleep(600)
stand_still()
"""
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(rank)], stdout=subprocess.PIPE) for rank in range(2)]
    for process in ranks:
        assert process.stdout is not None
        process.stdout.readline()
    ranks[1].send_signal(signal.SIGSTOP)
    os.waitpid(ranks[1].pid, os.WUNTRACED)  # it stops when it is next given a core
    try:
        with Watcher(tmp_path, tmp_path / "hangs") as watcher:
            assert ranks[1].wait(timeout=250) == -signal.SIGKILL
        assert watcher.verdict is not None
        assert watcher.verdict.culprits == (1,)
        (report,) = (tmp_path / "hangs").iterdir()
        assert str(report) in watcher.verdict.message
        assert report.read_text().count("in stand_still") == 2
        assert ranks[0].poll() is None
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_ranks_of_one_launch_meet_in_one_folder_and_those_of_the_next_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "0"}
    first = shared_folder(launch)
    assert shared_folder(launch) == first
    assert shared_folder(launch | {"TORCHELASTIC_RESTART_COUNT": "1"}) != first
    assert first.stat().st_mode & 0o77 == 0
