"""Missing ranks, closed ports, hanging stages, clocks and folders: detected and named in time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.doctor import storage
from shardwright.doctor.diagnosis import examine_rank
from shardwright.doctor.examination import (
    STAGES,
    ExaminationContext,
    ExaminationRequest,
    RankExamination,
)
from shardwright.doctor.examination_stages import run_stages
from shardwright.doctor.probe_budget import RankMaximum, TimeBudget
from shardwright.doctor.rendezvous import (
    RankLocation,
    Rendezvous,
    RendezvousFailed,
    join_rendezvous,
    judge_clocks,
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
    WriteResult,
    check_visibility,
    find_existing_folder,
    judge_writes,
    time_write,
)
from shardwright.errors import RankFailed
from shardwright.launch.devices import claim_device
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.layout import Layout
from shardwright.parallel.clock_sync import ClockOffset, estimate_clock_offset


@pytest.fixture
def port() -> int:
    """Return a port without a listener."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def master_address(monkeypatch: pytest.MonkeyPatch, port: int) -> str:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return f"127.0.0.1:{port}"


def test_a_closed_port_is_reported_with_its_address(port: int) -> None:
    start_seconds = time.monotonic()
    with pytest.raises(
        RendezvousFailed, match=rf"127\.0\.0\.1:{port} was not reached .*the port is closed"
    ) as caught:
        wait_for_port("127.0.0.1", port, 0.5)
    assert caught.value.finding.verdict == "fail"
    assert time.monotonic() - start_seconds < 60


def test_an_unknown_host_name_is_reported(port: int) -> None:
    with pytest.raises(RendezvousFailed, match="the name is unknown"):
        wait_for_port("no-such-host.invalid", port, 0.5)


def test_dropped_packets_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out(*args: Any, **kwargs: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", time_out)
    with pytest.raises(RendezvousFailed, match=r"packets are dropped.*nc -zv node-7 29500"):
        wait_for_port("node-7", 29500, 0.3)


@pytest.mark.usefixtures("master_address")
def test_a_rank_that_reaches_no_peer_ends_with_a_finding() -> None:
    request = ExaminationRequest(Layout(dp_shard=2, zero_stage=3), timeout_seconds=0.5)
    diagnosis = examine_rank(request, RankEnvironment(1, 2, 1), lambda diagnosis: None)
    assert diagnosis is not None
    (finding,) = [each for each in diagnosis.findings if each.verdict == "fail"]
    assert (finding.section, finding.name) == ("peers", "rendezvous")
    # Checks that need no peer are reported.
    assert any(each.section == "software" for each in diagnosis.findings)


def test_missing_ranks_are_named(master_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getnameinfo", lambda peer, flags: time.sleep(0.1))
    request = ExaminationRequest(Layout(dp_shard=4, zero_stage=3), timeout_seconds=1.0)
    diagnosis = examine_rank(request, RankEnvironment(0, 4, 0), lambda diagnosis: None)
    assert diagnosis is not None
    (finding,) = [each for each in diagnosis.findings if each.verdict == "fail"]
    assert f"ranks 1-3 of 4 did not reach {master_address}" in finding.value
    assert finding.numbers["missing"] == [1, 2, 3]
    assert "of its own address" in finding.remedy
    assert "4 times as long. Write the addresses of all nodes to /etc/hosts" in finding.remedy


def test_a_port_in_use_is_reported(master_address: str, port: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(RendezvousFailed, match=f"port {port} is in use"):
            join_rendezvous(RankEnvironment(0, 2, 0), 1.0)


def run_in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run `work(rank)` for every rank at the same time."""
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


def connect_stores(count: int) -> list[dist.Store]:
    """Return connections to one store, one per rank."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    others = [
        dist.TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False)
        for _ in range(count - 1)
    ]
    return [host, *others]


def test_clock_offsets_are_measured() -> None:
    stores = connect_stores(3)
    num_keys = stores[0].num_keys()
    for ahead in ({1: 3.0, 2: -0.5}, {1: -1.0, 2: 20.0}):  # one store serves many calls
        results_by_rank = run_in_threads(
            3,
            lambda rank, ahead=ahead: estimate_clock_offset(
                stores[rank], rank, 3, clock=lambda: time.time() + ahead.get(rank, 0.0)
            ),
        )
        assert results_by_rank[0] is None
        for rank in (1, 2):
            offset = results_by_rank[rank]
            assert isinstance(offset, ClockOffset)
            assert abs(offset.seconds - ahead[rank]) <= offset.error_seconds + 1e-3
    assert stores[0].num_keys() == num_keys


def test_a_rank_that_does_not_answer_ends_the_clock_exchange_in_time() -> None:
    for rank in (0, 1):
        stores = connect_stores(2)
        stores[rank].set_timeout(timedelta(seconds=0.5))
        with pytest.raises(dist.DistError, match=r"timeout|timed out"):
            estimate_clock_offset(stores[rank], rank, 2)


def test_a_folder_that_is_not_shared_is_detected(tmp_path: Path) -> None:
    stores = connect_stores(3)
    folders = [tmp_path / name for name in ("shared", "shared", "own")]
    for folder in set(folders):
        folder.mkdir()

    def check_folder(rank: int) -> Any:
        return check_visibility(
            OutputFolder("runs", str(folders[rank] / "not-yet" / "made"), True),
            stores[rank],
            rank,
            3,
            wait_seconds=0.5,
        )

    visibilities = run_in_threads(3, check_folder)
    assert [visibility.missing_ranks for visibility in visibilities] == [(2,), (2,), (0, 1)]
    assert list(tmp_path.rglob("*shardwright-doctor*")) == []


def test_the_write_test_uses_the_existing_parent_and_leaves_no_files(tmp_path: Path) -> None:
    written = time_write(
        OutputFolder("runs", str(tmp_path / "runs" / "demo"), True), num_bytes=2**20
    )
    assert (written.path, written.problem) == (str(tmp_path), "")
    assert written.bytes_per_second > 0
    assert list(tmp_path.iterdir()) == []
    assert find_existing_folder(tmp_path / "a" / "b") == tmp_path


def test_a_folder_that_cannot_be_written_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", refuse)
    assert (
        time_write(OutputFolder("runs", str(tmp_path), True)).problem == "No space left on device"
    )


def test_a_slow_disk_is_tested_with_a_smaller_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written: list[int] = []

    def write_seconds(path: Path, num_bytes: int) -> float:
        written.append(num_bytes)
        return num_bytes / rate

    monkeypatch.setattr(storage, "_write_seconds", write_seconds)
    for rate, sizes in ((1e9, [2**20, 2**25]), (1e6, [2**20, 5 * 10**6]), (1e5, [2**20])):
        written.clear()
        results_by_rank = time_write(OutputFolder("runs", str(tmp_path), True))
        assert written == pytest.approx(sizes, rel=1e-6)
        assert results_by_rank.bytes_per_second == pytest.approx(rate)


@pytest.mark.parametrize(
    ("rate", "text"), [(1.28e9, "1.28 GB/s"), (9.996e8, "1 GB/s"), (5.88e8, "588 MB/s")]
)
def test_rates_of_folders_have_a_unit_of_their_size(rate: float, text: str) -> None:
    result = WriteResult("run folder", "/run", free_bytes=2**40, bytes_per_second=rate)
    (finding,) = judge_writes({0: [result]}, {0: "a"})
    assert finding.value.endswith(f" free, {text} with fsync")


def test_ranks_that_reach_the_clock_exchange_too_late_are_skipped() -> None:
    stores = connect_stores(3)
    results_by_rank = run_in_threads(
        3, lambda rank: estimate_clock_offset(stores[rank], rank, 3, max_seconds=-1.0)
    )
    assert results_by_rank == [None] * 3
    (finding,) = judge_clocks({1: ClockOffset(0.0, 1e-4)}, dict.fromkeys(range(3), "a"))
    assert "on 1 of 2 ranks, all that answered within 10 s" in finding.value


def make_rank_maxima(count: int) -> tuple[list[RankMaximum], list[StageWatchdog]]:
    stores = connect_stores(count)
    locations = {rank: RankLocation("a", "a", rank) for rank in range(count)}
    watchdogs = [
        StageWatchdog(60.0, lambda stage: None, rank, stores[rank]) for rank in range(count)
    ]
    rendezvous_of_rank = [
        Rendezvous(rank, locations, stores[rank], stores[rank], "", 0.0) for rank in range(count)
    ]
    maxima = [RankMaximum(*pair) for pair in zip(rendezvous_of_rank, watchdogs, strict=True)]
    return maxima, watchdogs


def test_ranks_get_the_maximum_of_each_call() -> None:
    maxima, watchdogs = make_rank_maxima(3)
    numbers = {0: [1.0, 5e-7], 1: [0.25, 2.0], 2: [3.5, 0.0]}
    results_by_rank = run_in_threads(
        3, lambda rank: [maxima[rank](number) for number in numbers[rank]]
    )
    assert results_by_rank == [[3.5, 2.0]] * 3
    for watchdog in watchdogs:
        watchdog.close()


def test_a_budget_ends_on_all_ranks_at_once() -> None:
    maxima, watchdogs = make_rank_maxima(2)
    expired_start = time.monotonic() - 100
    budgets = [TimeBudget(50.0, maxima[0]), TimeBudget(50.0, maxima[1], started=expired_start)]
    assert run_in_threads(2, lambda rank: budgets[rank].can_afford(1.0)) == [False, False]
    budgets[1].seconds = budgets[0].seconds = 1000.0
    assert run_in_threads(2, lambda rank: budgets[rank].can_afford(1.0)) == [True, True]
    for watchdog in watchdogs:
        watchdog.close()


def test_no_rank_waits_for_the_number_of_a_failed_rank() -> None:
    maxima, watchdogs = make_rank_maxima(2)
    watchdogs[1]._store.set(BROKEN_KEY, "1")  # type: ignore[union-attr]
    with pytest.raises(RankFailed):
        maxima[0](1.0)
    for watchdog in watchdogs:
        watchdog.close()


class ManualClock:
    """Monotonic clock that tests advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_a_hanging_stage_is_detected_and_a_progressing_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock()
    expiry = threading.Event()
    monkeypatch.setattr("shardwright.doctor.stage_watchdog.time", clock)
    expired: list[str] = []

    def expire(stage: str) -> None:
        expired.append(stage)
        expiry.set()

    watchdog = StageWatchdog(0.6, expire)
    with watchdog.watch_stage("products"):
        for _ in range(6):
            clock.now += 0.5
            assert not expiry.wait(0.3)  # longer than a poll of the watchdog
            watchdog.record_progress()
    with watchdog.watch_stage("collectives"):
        clock.now += 0.7
        assert expiry.wait(60.0)
    watchdog.close()
    assert expired == ["collectives"]


def test_ranks_behind_are_named() -> None:
    (store,) = connect_stores(1)
    locations = {rank: RankLocation(f"node-{rank}", f"node-{rank}", 0) for rank in range(3)}
    rendezvous = Rendezvous(0, locations, store, store, "127.0.0.1:1", 0.1)
    store.set("stage/0", "correctness")
    store.set("stage/1", "products")
    finding = judge_timeout("correctness", 60, rendezvous, STAGES)
    assert "rank 1 (node-1) still at products" in finding.value
    assert "rank 2 (node-2) still at the start" in finding.value
    assert finding.numbers["behind"] == [1, 2]
    store.set("stage/1", "correctness")
    store.set("stage/2", "collectives")
    assert (
        "all ranks are in this stage" in judge_timeout("correctness", 60, rendezvous, STAGES).value
    )


class SlowStore:
    """Store at which each wait advances the clock by a second."""

    def __init__(self, store: dist.Store, clock: ManualClock) -> None:
        self.store = store
        self.get_clock = clock
        self.check = store.check
        self.add = store.add

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.get_clock.now += 1.0
        self.store.wait(keys, timeout)


def test_a_rank_waits_for_progressing_ranks_and_not_for_a_failed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock()
    stores = connect_stores(2)
    expired: list[str] = []
    monkeypatch.setattr("shardwright.doctor.stage_watchdog.time", clock)
    monkeypatch.setattr(
        "shardwright.doctor.stage_watchdog._POLL_INTERVAL", timedelta(milliseconds=50)
    )
    watchdogs = [StageWatchdog(6.0, expired.append, 0, store) for store in stores]

    def work_slowly(rank: int) -> Any:
        with watchdogs[rank].watch_stage("products"):
            if rank == 0:
                watchdogs[0].wait_for_key("started/copies")  # longer than its own timeout
                with pytest.raises(RankFailed, match="another rank has failed"):
                    watchdogs[0].wait_for_key("started/folders")
                reports = {0: "here", 1: "report/1", 2: "report/2"}
                slow_store: Any = SlowStore(stores[0], clock)
                return wait_for_reports(slow_store, reports, 0.5)
            for _ in range(4):
                clock.now += 2.0
                watchdogs[1].record_progress()
                while watchdogs[0]._last_progress < clock.now:  # until rank 0 has seen it
                    time.sleep(0.01)
            stores[1].set("started/copies", "1")
            stores[1].set("report/1", "{}")
            stores[1].set("here", "1")
            stores[1].set(BROKEN_KEY, "1")
            return None

    assert run_in_threads(2, work_slowly) == [[2], None]
    for watchdog in watchdogs:
        watchdog.close()
    assert expired == []


def test_two_ranks_on_one_device_fail_before_they_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(uuid="a")
    )
    device = torch.device("cuda", 0)
    store = dist.HashStore()
    claim_device(store, RankEnvironment(0, 2, 0), device)
    store.set("started/groups", "1")  # rank 0 waits for this rank
    location = RankLocation("host", "node", 0)
    watchdog = StageWatchdog(60.0, lambda _stage: None, rank=1, store=store)
    context = ExaminationContext(
        ExaminationRequest(Layout(dp_shard=2)),
        RankEnvironment(1, 2, 1),
        device,
        Rendezvous(1, dict.fromkeys(range(2), location), store, store, "host:1", 0.0),
        watchdog,
        RankExamination(1, "host", "cuda"),
    )
    run_stages(context)
    watchdog.close()
    assert context.report.failure is not None
    stage, reason = context.report.failure
    assert stage == "groups"
    assert "ranks 0 and 1 compute on the same device, GPU-a" in reason
    assert store.check([BROKEN_KEY])
