"""Processes that outlive a generation: who stays, who is replaced, and that none is left over."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import ExitCode
from shardwright.launch import rank_processes
from shardwright.launch.rank_processes import (
    RankEndings,
    RankProcesses,
    choose_leaving_ranks,
)
from shardwright.watchdog.heartbeat import HeartbeatWriter
from tests import forked


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankProcesses]:
    monkeypatch.setattr(rank_processes, "Popen", forked.Popen)
    with RankProcesses(num_restarts=3) as pool:
        yield pool


def run_generation(
    processes: RankProcesses, folder: Path, name: str, *orders: str
) -> tuple[RankEndings, list[dict[str, Any]]]:
    """Run a generation; return its end and the records of its ranks, except those of ranks that
    were killed before they wrote one.
    """
    control = folder / name
    control.mkdir()
    module = "tests.unit.launch.assigned_rank"
    endings = processes.run(len(orders), module, [json.dumps(orders)], control)
    records = [folder / f"{name}-{rank}.json" for rank in range(len(orders))]
    return endings, [json.loads(record.read_text()) for record in records if record.exists()]


def test_survivors_keep_their_process(processes: RankProcesses, tmp_path: Path) -> None:
    orders = ("lose peer", "die", "wait")
    endings, first = run_generation(processes, tmp_path, "first", *orders)
    assert endings.statuses[1] == -signal.SIGKILL
    assert endings.statuses[0] == endings.statuses[2] == ExitCode.RUN_FAILED
    assert processes.list_survivors(3) == (0, 2)
    assert processes.list_survivors(2) == (0, 1)  # rank 2 becomes rank 1
    endings, second = run_generation(processes, tmp_path, "second", "finish", "finish", "finish")
    assert endings == RankEndings()
    pids = [record["pid"] for record in second]
    assert (pids[0], pids[2]) == (first[0]["pid"], first[2]["pid"])
    assert pids[1] not in [record["pid"] for record in first]
    assert [record["RANK"] for record in second] == ["0", "1", "2"]
    assert {record["TORCHELASTIC_USE_AGENT_STORE"] for record in second} == {"True"}
    assert not {record["MASTER_PORT"] for record in first} & {
        record["MASTER_PORT"] for record in second
    }


def test_a_process_with_an_error_of_its_own_is_replaced(
    processes: RankProcesses, tmp_path: Path
) -> None:
    endings, first = run_generation(processes, tmp_path, "first", "wait", "fail")
    assert endings.statuses == {0: ExitCode.RUN_FAILED, 1: ExitCode.WRONG_INPUT}
    assert processes.list_survivors(2) == (0,)
    _, second = run_generation(processes, tmp_path, "second", "finish", "finish")
    assert first[0]["pid"] == second[0]["pid"]
    assert not psutil.pid_exists(first[1]["pid"])


def test_a_smaller_generation_ends_the_other_processes(
    processes: RankProcesses, tmp_path: Path
) -> None:
    _, first = run_generation(processes, tmp_path, "first", "die", "lose peer", "lose peer")
    _, second = run_generation(processes, tmp_path, "second", "finish")
    assert second[0]["WORLD_SIZE"] == "1"
    assert second[0]["pid"] == first[1]["pid"]
    assert not psutil.pid_exists(first[2]["pid"])


@given(st.integers(2, 12), st.data())
def test_processes_that_leave_take_no_copy_with_its_owner(num_ranks: int, data: Any) -> None:
    """If every second rank may leave, no two neighbours are lost; ranks 0 and the last are such."""
    lost = data.draw(st.integers(0, num_ranks - 1))
    alive = set(range(num_ranks)) - {lost}
    num_leaving = data.draw(st.integers(0, max(0, (num_ranks - 2) // 2 - 1)))
    leaving = choose_leaving_ranks(alive, num_leaving, num_ranks)
    assert len(leaving) == num_leaving
    gone = leaving | {lost}
    assert leaving <= alive
    if num_ranks % 2 == 0:
        assert not any((rank + 1) % num_ranks in gone for rank in gone)


def test_all_stay_when_more_ranks_follow(processes: RankProcesses, tmp_path: Path) -> None:
    """Ranks that leave for a larger generation have not failed; spares take the new ranks."""
    heartbeats = tmp_path / "heartbeats"
    heartbeats.mkdir()
    processes._module = "tests.unit.launch.assigned_rank"
    processes._num_restarts_left = 1
    processes.num_awaited_ranks = 2
    processes._prepare_spares(heartbeats, 0)
    spares = [spare.pid for spare in processes._spares]
    endings, first = run_generation(processes, tmp_path, "first", "finish", "leave")
    assert endings == RankEndings()
    assert (processes._num_restarts_left, len(spares)) == (1, 3)
    assert processes.list_survivors(2) == (1,)
    _, second = run_generation(processes, tmp_path, "second", *["leave"] * 2)
    assert [record["pid"] for record in second] == [spares[2], first[1]["pid"]]
    processes.num_awaited_ranks = 0
    endings, third = run_generation(processes, tmp_path, "third", *["finish"] * 4)
    assert endings == RankEndings()
    assert [record["pid"] for record in third[:2]] == [record["pid"] for record in second]


def test_a_process_that_cannot_leave_is_killed(
    processes: RankProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_processes, "REBUILD_SECONDS", 0.1)
    endings, _ = run_generation(processes, tmp_path, "first", "wait", "die")
    assert processes.stuck_ranks == (0,)
    assert list(endings.statuses) == [1, 0]
    assert endings.ended_at_seconds[0] == float("inf")
    assert processes.list_survivors(2) == ()


def test_the_spare_takes_the_lost_rank(
    processes: RankProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started once no rank is in its set-up, and only if restarts remain."""
    started = list[int]()
    start = RankProcesses._start_process

    def record_start(self: RankProcesses) -> Any:
        process = start(self)
        started.append(process.pid)
        return process

    monkeypatch.setattr(RankProcesses, "_start_process", record_start)
    first = tmp_path / "heartbeats"
    first.mkdir()
    heartbeat = HeartbeatWriter(first, 0, 1)
    processes._module = "tests.unit.launch.assigned_rank"
    processes._prepare_spares(first, 1)
    assert not started
    heartbeat.begin_phase("step", 0.0)
    processes._prepare_spares(first, 1)
    processes._prepare_spares(first, 1)
    heartbeat.close()
    (spare,) = started
    _, (record,) = run_generation(processes, tmp_path, "first", "die")
    assert record["pid"] == spare
    assert started == [spare]
    processes._num_restarts_left = 0
    processes._prepare_spares(first, 0)
    assert started == [spare]


def test_no_process_is_left_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rank_processes, "Popen", forked.Popen)
    with RankProcesses(num_restarts=1) as pool:
        _, records = run_generation(pool, tmp_path, "first", "die", "lose peer")
        assert psutil.pid_exists(records[1]["pid"])
        began = time.monotonic()
    assert time.monotonic() - began < rank_processes._EXIT_SECONDS
    assert not psutil.pid_exists(records[1]["pid"])


def test_only_rank_0_writes_to_the_terminal(
    processes: RankProcesses, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_generation(processes, tmp_path, "first", "finish", "finish")
    assert capfd.readouterr().out == "rank 0 of first\n"
    assert os.environ.get("RANK") is None
