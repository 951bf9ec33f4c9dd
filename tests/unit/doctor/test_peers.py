"""Peers that do not come, ports that are closed, stages that hang, clocks and folders: found,
named, and never waited for long.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwright.doctor import clock_offset as clock
from shardwright.doctor import storage
from shardwright.doctor.clock_offset import ClockOffset, estimate_clock_offset, judge_clocks
from shardwright.doctor.diagnosis import examine_rank
from shardwright.doctor.examination import STAGES, ExaminationRequest
from shardwright.doctor.probe_budget import RankMaximum, TimeBudget
from shardwright.doctor.rendezvous import (
    RankLocation,
    Rendezvous,
    RendezvousFailed,
    join_rendezvous,
    wait_for_port,
)
from shardwright.doctor.stage_watchdog import (
    BROKEN_KEY,
    StageWatchdog,
    judge_timeout,
    wait_for_reports,
)
from shardwright.doctor.storage import (
    OutputFolder,
    check_visibility,
    find_existing_folder,
    time_write,
)
from shardwright.errors import RankFailed
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.layout import Layout


@pytest.fixture
def port() -> int:
    """One that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def meeting_place(monkeypatch: pytest.MonkeyPatch, port: int) -> str:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return f"127.0.0.1:{port}"


def test_a_closed_port_is_told_with_its_address(port: int) -> None:
    began = time.monotonic()
    with pytest.raises(
        RendezvousFailed, match=rf"127\.0\.0\.1:{port} was not reached .*the port is closed"
    ) as caught:
        wait_for_port("127.0.0.1", port, 0.5)
    assert caught.value.finding.verdict == "fail"
    assert time.monotonic() - began < 60


def test_an_unknown_name_is_told_as_such(port: int) -> None:
    with pytest.raises(RendezvousFailed, match="the name is unknown"):
        wait_for_port("no-such-host.invalid", port, 0.5)


def test_packets_that_are_dropped_are_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(*words: Any, **more: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", no_answer)
    with pytest.raises(RendezvousFailed, match=r"packets are dropped.*nc -zv node-7 29500"):
        wait_for_port("node-7", 29500, 0.3)


@pytest.mark.usefixtures("meeting_place")
def test_a_rank_that_reaches_nobody_ends_with_a_finding() -> None:
    order = ExaminationRequest(Layout(dp_shard=2, zero_stage=3), timeout_seconds=0.5)
    diagnosis = examine_rank(order, RankEnvironment(1, 2, 1), lambda diagnosis: None)
    assert diagnosis is not None
    (finding,) = [one for one in diagnosis.findings if one.verdict == "fail"]
    assert (finding.section, finding.name) == ("peers", "rendezvous")
    assert any(
        one.section == "software" for one in diagnosis.findings
    )  # what can be said alone is said


def test_ranks_that_do_not_come_are_named(meeting_place: str) -> None:
    order = ExaminationRequest(Layout(dp_shard=4, zero_stage=3), timeout_seconds=1.0)
    diagnosis = examine_rank(order, RankEnvironment(0, 4, 0), lambda diagnosis: None)
    assert diagnosis is not None
    (finding,) = [one for one in diagnosis.findings if one.verdict == "fail"]
    assert f"ranks 1-3 of 4 did not reach {meeting_place}" in finding.value
    assert finding.numbers["missing"] == [1, 2, 3]


def test_a_taken_port_is_told(meeting_place: str, port: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(RendezvousFailed, match=f"port {port} is in use"):
            join_rendezvous(RankEnvironment(0, 2, 0), 1.0)


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """`work(rank)` for every rank, at the same time."""
    results: list[Any] = [None] * count
    threads = [
        threading.Thread(target=lambda rank=rank: results.__setitem__(rank, work(rank)))
        for rank in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=250)
    return results


def connected(count: int) -> list[dist.Store]:
    """Lines to one store, one per rank."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    others = [
        dist.TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False)
        for _ in range(count - 1)
    ]
    return [host, *others]


def test_a_clock_that_is_ahead_is_measured() -> None:
    stores = connected(3)
    ahead = {0: 0.0, 1: 3.0, 2: -0.5}
    found = in_threads(
        3,
        lambda rank: estimate_clock_offset(
            stores[rank], rank, 3, clock=lambda: time.time() + ahead[rank]
        ),
    )
    assert found[0] is None
    for rank in (1, 2):
        offset = found[rank]
        assert isinstance(offset, ClockOffset)
        assert abs(offset.seconds - ahead[rank]) <= offset.error_seconds + 1e-3


def test_a_folder_that_is_not_shared_is_noticed(tmp_path: Path) -> None:
    stores = connected(3)
    folders = [tmp_path / name for name in ("shared", "shared", "own")]
    for folder in set(folders):
        folder.mkdir()

    def look(rank: int) -> Any:
        return check_visibility(
            OutputFolder("runs", str(folders[rank] / "not-yet" / "made"), True),
            stores[rank],
            rank,
            3,
            wait_seconds=0.5,
        )

    sights = in_threads(3, look)
    assert [sight.missing_ranks for sight in sights] == [(2,), (2,), (0, 1)]
    assert list(tmp_path.rglob("*shardwright-doctor*")) == []


def test_a_folder_is_written_where_it_would_be_made_and_left_clean(tmp_path: Path) -> None:
    written = time_write(
        OutputFolder("runs", str(tmp_path / "runs" / "demo"), True), num_bytes=2**20
    )
    assert (written.path, written.problem) == (str(tmp_path), "")
    assert written.bytes_per_second > 0
    assert list(tmp_path.iterdir()) == []
    assert find_existing_folder(tmp_path / "a" / "b") == tmp_path


def test_a_folder_that_takes_no_files_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*words: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", refuse)
    assert (
        time_write(OutputFolder("runs", str(tmp_path), True)).problem == "No space left on device"
    )


def test_a_slow_disk_gets_a_smaller_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[int] = []

    def write_seconds(path: Path, num_bytes: int) -> float:
        written.append(num_bytes)
        return num_bytes / rate

    monkeypatch.setattr(storage, "_write_seconds", write_seconds)
    for rate, sizes in ((1e9, [2**20, 2**25]), (1e6, [2**20, 5 * 10**6]), (1e5, [2**20])):
        written.clear()
        found = time_write(OutputFolder("runs", str(tmp_path), True))
        assert written == pytest.approx(sizes, rel=1e-6)
        assert found.bytes_per_second == pytest.approx(rate)


def test_ranks_whose_turn_at_the_clock_comes_too_late_are_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clock, "_MAX_ANSWER_SECONDS", -1.0)
    stores = connected(3)
    assert in_threads(3, lambda rank: estimate_clock_offset(stores[rank], rank, 3)) == [None] * 3
    monkeypatch.setattr(clock, "_MAX_ANSWER_SECONDS", 10.0)
    (finding,) = judge_clocks({1: ClockOffset(0.0, 1e-4)}, dict.fromkeys(range(3), "a"))
    assert "on 1 of 2 ranks, all that answered within 10 s" in finding.value


def agreements(count: int) -> tuple[list[RankMaximum], list[StageWatchdog]]:
    stores = connected(count)
    seats = {rank: RankLocation("a", "a", rank) for rank in range(count)}
    watches = [StageWatchdog(60.0, lambda stage: None, rank, stores[rank]) for rank in range(count)]
    meetings = [
        Rendezvous(rank, seats, stores[rank], stores[rank], "", 0.0) for rank in range(count)
    ]
    return [RankMaximum(*pair) for pair in zip(meetings, watches, strict=True)], watches


def test_ranks_agree_on_the_largest_number_of_each_call() -> None:
    agree, watches = agreements(3)
    given = {0: [1.0, 5e-7], 1: [0.25, 2.0], 2: [3.5, 0.0]}
    found = in_threads(3, lambda rank: [agree[rank](number) for number in given[rank]])
    assert found == [[3.5, 2.0]] * 3
    for watch in watches:
        watch.close()


def test_a_budget_ends_on_all_ranks_when_it_ends_on_one() -> None:
    agree, watches = agreements(2)
    late = time.monotonic() - 100
    budgets = [TimeBudget(50.0, agree[0]), TimeBudget(50.0, agree[1], started=late)]
    assert in_threads(2, lambda rank: budgets[rank].can_afford(1.0)) == [False, False]
    budgets[1].seconds = budgets[0].seconds = 1000.0
    assert in_threads(2, lambda rank: budgets[rank].can_afford(1.0)) == [True, True]
    for watch in watches:
        watch.close()


def test_nobody_waits_for_the_number_of_a_rank_that_broke_off() -> None:
    agree, watches = agreements(2)
    watches[1]._store.set(BROKEN_KEY, "1")  # type: ignore[union-attr]
    with pytest.raises(RankFailed):
        agree[0](1.0)
    for watch in watches:
        watch.close()


class Clock:
    """A monotonic clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_a_stage_that_hangs_is_noticed_and_one_that_goes_on_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    noticed = threading.Event()
    monkeypatch.setattr("shardwright.doctor.stage_watchdog.time", clock)
    expired: list[str] = []

    def expire(stage: str) -> None:
        expired.append(stage)
        noticed.set()

    watch = StageWatchdog(0.6, expire)
    with watch.watch_stage("products"):
        for _ in range(6):
            clock.now += 0.5
            assert not noticed.wait(0.3)  # longer than a tick of the watch
            watch.record_progress()
    with watch.watch_stage("collectives"):
        clock.now += 0.7
        assert noticed.wait(60.0)
    watch.close()
    assert expired == ["collectives"]


def test_who_is_behind_is_named() -> None:
    (store,) = connected(1)
    seats = {rank: RankLocation(f"node-{rank}", f"node-{rank}", 0) for rank in range(3)}
    meeting = Rendezvous(0, seats, store, store, "127.0.0.1:1", 0.1)
    store.set("stage/0", "correctness")
    store.set("stage/1", "products")
    finding = judge_timeout("correctness", 60, meeting, STAGES)
    assert "rank 1 (node-1) still at products" in finding.value
    assert "rank 2 (node-2) still at the start" in finding.value
    assert finding.numbers["behind"] == [1, 2]
    store.set("stage/1", "correctness")
    store.set("stage/2", "collectives")
    assert "all ranks are in this stage" in judge_timeout("correctness", 60, meeting, STAGES).value


class SlowStore:
    """A store at which the clock goes on by a second whenever somebody waits."""

    def __init__(self, store: dist.Store, clock: Clock) -> None:
        self.store = store
        self.get_clock = clock
        self.check = store.check
        self.add = store.add

    def wait(self, keys: list[str], most: timedelta) -> None:
        self.get_clock.now += 1.0
        self.store.wait(keys, most)


def test_a_rank_waits_for_those_that_make_progress_and_not_for_one_that_broke(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, (stores, expired) = Clock(), (connected(2), list[str]())
    monkeypatch.setattr("shardwright.doctor.stage_watchdog.time", clock)
    monkeypatch.setattr(
        "shardwright.doctor.stage_watchdog._POLL_INTERVAL", timedelta(milliseconds=50)
    )
    watches = [StageWatchdog(6.0, expired.append, 0, store) for store in stores]

    def be_slow(rank: int) -> Any:
        with watches[rank].watch_stage("products"):
            if rank == 0:
                watches[0].wait_for_key("started/copies")  # longer than its own time-out
                with pytest.raises(RankFailed, match="another rank has failed"):
                    watches[0].wait_for_key("started/folders")
                reports = {0: "here", 1: "report/1", 2: "report/2"}
                return wait_for_reports(SlowStore(stores[0], clock), reports, 0.5)  # type: ignore[arg-type]
            for _ in range(4):
                clock.now += 2.0
                watches[1].record_progress()
                while watches[0]._last_progress < clock.now:  # until it has seen that
                    time.sleep(0.01)
            stores[1].set("started/copies", "1")
            stores[1].set("report/1", "{}")
            stores[1].set("here", "1")
            stores[1].set(BROKEN_KEY, "1")
            return None

    assert in_threads(2, be_slow) == [[2], None]
    for watch in watches:
        watch.close()
    assert expired == []
