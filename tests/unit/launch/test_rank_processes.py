"""Processes that outlive a generation: who stays, who is replaced, and that none is left over."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import ExitCode, InputError, RankFailed, RunFailed
from shardwright.launch import node_service, nodes, rank_processes
from shardwright.launch.node_connections import Nodes
from shardwright.launch.node_place import NodePlace
from shardwright.launch.nodes import LocalNode, LocalProcess
from shardwright.launch.rank_outcome import read_outcomes
from shardwright.launch.rank_processes import (
    RankEndings,
    RankProcesses,
    choose_leaving_ranks,
)
from shardwright.watchdog.heartbeat import HeartbeatWriter
from tests import forked


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankProcesses]:
    monkeypatch.setattr(nodes, "Popen", forked.Popen)
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
    (folder / "orders.json").write_text(json.dumps(orders))
    arguments = [str(folder / "orders.json"), str(folder / name)]
    endings = processes.run(len(orders), "tests.unit.launch.assigned_rank", arguments, control)
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
    leaving = choose_leaving_ranks(alive, num_leaving, [0] * num_ranks)
    assert len(leaving) == num_leaving
    gone = leaving | {lost}
    assert leaving <= alive
    if num_ranks % 2 == 0:
        assert not any((rank + 1) % num_ranks in gone for rank in gone)


def test_all_stay_when_more_ranks_follow(processes: RankProcesses, tmp_path: Path) -> None:
    """Ranks that leave for a larger generation have not failed; spares take the new ranks."""
    processes._module = "tests.unit.launch.assigned_rank"
    processes._num_restarts_left = 1
    processes.num_awaited_ranks = 2
    processes._prepare_spares(0)
    spares = [spare.process.pid for spare in processes._spares if isinstance(spare, LocalProcess)]
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
    start = LocalNode.start_process

    def record_start(self: LocalNode, module: str) -> Any:
        process = start(self, module)
        started.append(process.process.pid)
        return process

    monkeypatch.setattr(LocalNode, "start_process", record_start)
    first = tmp_path / "heartbeats"
    first.mkdir()
    heartbeat = HeartbeatWriter(first, 0, 1)
    processes._module = "tests.unit.launch.assigned_rank"
    processes.nodes.local.begin_generation(first, [], None)
    processes._prepare_spares(1)
    assert not started
    heartbeat.begin_phase("step", 0.0)
    processes._prepare_spares(1)
    processes._prepare_spares(1)
    heartbeat.close()
    (spare,) = started
    _, (record,) = run_generation(processes, tmp_path, "first", "die")
    assert record["pid"] == spare
    assert started == [spare]
    processes._num_restarts_left = 0
    processes._prepare_spares(0)
    assert started == [spare]


def test_no_process_is_left_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nodes, "Popen", forked.Popen)
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


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RankProcesses, NodePlace]]:
    """Processes of this node and another one, two ranks each; the test connects the other one."""
    monkeypatch.setattr(nodes, "Popen", forked.Popen)
    monkeypatch.setattr(node_service, "_EXIT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    place = NodePlace(1, 2, "127.0.0.1", port, "secret")
    with Nodes(place, 2, "run", wait_seconds=0.1) as connected, RankProcesses(9, connected) as pool:
        yield pool, place


@contextmanager
def connect_node(pool: RankProcesses, place: NodePlace, run: str = "run") -> Iterator[Any]:
    """Run the service of another node in a thread; yield its connection."""
    num_slots = pool.nodes.count_slots()
    connection = node_service.connect(place)

    def serve() -> None:
        with suppress(RunFailed):  # the launcher is lost when the test shuts the connection
            node_service.serve(connection, place, 2, run)

    service = threading.Thread(target=serve)
    service.start()
    while pool.nodes.count_slots() == num_slots:
        time.sleep(0.01)
    yield connection
    service.join()


def test_ranks_of_a_lost_node_move_to_one_that_connects(
    two_nodes: tuple[RankProcesses, NodePlace], tmp_path: Path
) -> None:
    pool, place = two_nodes
    with connect_node(pool, place) as connection:
        orders = ("lose peer", "lose peer", "die", "lose peer")
        endings, first = run_generation(pool, tmp_path, "first", *orders)
        assert endings.statuses[2] == -signal.SIGKILL
        assert [record["LOCAL_RANK"] for record in first] == ["0", "1", "0", "1"]
        # Both have this machine's name.
        assert [record["GROUP_RANK"] for record in first] == ["0", "0", "1", "1"]
        assert pool.list_survivors(4) == (0, 1, 3)
        outcomes = read_outcomes(tmp_path / "first")
        assert sorted(outcome.rank for outcome in outcomes) == [0, 1, 3]
        _, second = run_generation(pool, tmp_path, "second", *["leave"] * 4)
        assert [record["pid"] for record in second[:2]] == [record["pid"] for record in first[:2]]
        assert second[3]["pid"] == first[3]["pid"]
        connection.shutdown(socket.SHUT_RDWR)
    assert not any(psutil.pid_exists(record["pid"]) for record in second[2:]), "left on the node"
    assert pool.list_survivors(4) == (0, 1)
    with pytest.raises(RankFailed, match=r"can run 2 of 4 ranks; no other node has connected"):
        run_generation(pool, tmp_path, "third", *["finish"] * 4)
    _, smaller = run_generation(pool, tmp_path, "smaller", "leave", "leave")
    with connect_node(pool, place) as connection:
        _, larger = run_generation(pool, tmp_path, "larger", *["leave"] * 4)
        assert [record["pid"] for record in larger[:2]] == [record["pid"] for record in smaller]
        connection.shutdown(socket.SHUT_RDWR)


def test_a_node_lost_in_a_generation_is_the_reason(
    two_nodes: tuple[RankProcesses, NodePlace], tmp_path: Path
) -> None:
    pool, place = two_nodes
    with connect_node(pool, place) as connection:
        threading.Timer(0.5, connection.shutdown, [socket.SHUT_RDWR]).start()
        endings, _ = run_generation(pool, tmp_path, "first", "wait", "wait", "hang", "hang")
    assert {endings.statuses[2], endings.statuses[3]} == {ExitCode.RUN_FAILED}
    (cause,) = [
        outcome.message for outcome in read_outcomes(tmp_path / "first") if outcome.rank == 2
    ]
    assert cause == f"node {socket.gethostname()} was lost, with the rank's process"


def test_only_nodes_of_the_run_are_accepted(two_nodes: tuple[RankProcesses, NodePlace]) -> None:
    _, place = two_nodes
    with pytest.raises(InputError, match="refuses this node: run 'other', not 'run'"):
        node_service.serve(node_service.connect(place), place, 2, "other")
    for token in ("", "another"):
        with pytest.raises(InputError, match="node: its SHARDWRIGHT_NODE_TOKEN differs"):
            node_service.serve(node_service.connect(place), replace(place, token=token), 2, "run")
