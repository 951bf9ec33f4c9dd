"""The rank pool: results by rank, errors with rank and traceback, failed or blocked ranks, and
use after a failure.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tqdm import tqdm

from shardwright.errors import LayoutError, RankFailed
from shardwright.verification import rank_pool
from tests.multiprocess.pool import RankPool


def sum_of_ranks(offset: int) -> tuple[int, int, int]:
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return dist.get_rank(), int(total), os.getpid()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise LayoutError("too many shards", field="layout.tp", got=3)
    dist.barrier()


def kill_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def stall_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def read_threads_and_group() -> tuple[int, bool]:
    return torch.get_num_threads(), dist.is_initialized()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_results_are_by_rank_and_workers_persist(ranks: RankPool, num_ranks: int) -> None:
    first = ranks.run(num_ranks, sum_of_ranks, 10)
    second = ranks.run(num_ranks, sum_of_ranks, 10)
    assert first == second
    assert [rank for rank, _, _ in first] == list(range(num_ranks))
    assert {total for _, total, _ in first} == {10 * num_ranks + num_ranks * (num_ranks - 1) // 2}


def test_one_rank_has_no_group_and_one_thread(ranks: RankPool) -> None:
    assert ranks.run(1, read_threads_and_group) == [(1, False)]


def test_an_error_names_its_rank_and_is_the_cause() -> None:
    with RankPool() as pool:
        with pytest.raises(RankFailed, match=r"rank 1 of 2: layout\.tp: too many shards") as caught:
            pool.run(2, fail_on, 1)
        assert isinstance(caught.value.__cause__, LayoutError)
        assert "in fail_on" in str(caught.value)
        assert pool.run(2, sum_of_ranks, 0)[0][1] == 1  # a new group


def list_tracked_names_of_a_progress_bar() -> list[str]:
    """Names that the process registers for removal after its end."""
    names: list[str] = []
    with mock.patch.object(resource_tracker, "register", lambda name, kind: names.append(name)):
        tqdm(range(1), disable=True)
    return names


def test_a_killed_worker_leaves_no_semaphore_of_a_progress_bar() -> None:
    """Compilation shows one; `verify --all` ended with a warning of leaked semaphores."""
    with RankPool() as pool:
        assert pool.run(1, list_tracked_names_of_a_progress_bar) == [[]]


def fail_late_on(rank: int, after_seconds: float) -> None:
    """Fail with the cause later than the other ranks fail with its consequences."""
    if dist.get_rank() == rank:
        time.sleep(after_seconds)
        raise LayoutError("too many shards", field="layout.tp", got=3)
    raise RuntimeError("Connection closed by peer")


def test_a_cause_later_than_its_consequences_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_pool, "_GRACE_SECONDS", 0.05)
    with RankPool() as pool, pytest.raises(RankFailed, match=r"rank 1 of 2: layout\.tp"):
        pool.run(2, fail_late_on, 1, 0.5)


def test_a_killed_rank_is_named() -> None:
    with RankPool() as pool, pytest.raises(RankFailed, match="rank 0 of 2 was killed by SIGKILL"):
        pool.run(2, kill_on, 0)


def test_a_blocked_rank_is_named() -> None:
    with RankPool() as pool:
        pool.run(2, sum_of_ranks, 0)  # starting a group takes seconds; an answer does not
        with pytest.raises(RankFailed, match=r"no answer from rank 1 of 2 within 4 s"):
            pool.run(2, stall_on, 1, timeout_seconds=4.0)


STOPPED_SCRIPT = """
import os, signal, time
from shardwright.cli.main import main
from shardwright.verification.rank_pool import RankPool
from shardwright.worker_processes import interrupt_on_termination

def answer(seconds):
    time.sleep(seconds)
    return os.getpid()

def verify():
    with interrupt_on_termination(), RankPool() as pool:
        print(*pool.run(2, answer, 0.0), flush=True)
        pool.run(2, answer, SECONDS)

if __name__ == "__main__":
    # A test run in the background of a shell inherits that it ignores SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import shardwright.cli.schema
    shardwright.cli.schema.schema_command = verify
    main(["schema"])
"""


@pytest.mark.parametrize(
    ("number", "seconds", "code", "message"),
    [
        (signal.SIGTERM, 600.0, 130, "interrupted; nothing new was saved\n"),
        (signal.SIGINT, 600.0, 130, "interrupted; nothing new was saved\n"),
        (signal.SIGKILL, 2.0, -signal.SIGKILL, ""),
    ],
)
def test_a_stopped_verification_leaves_one_line_and_no_process(
    tmp_path: Path, number: signal.Signals, seconds: float, code: int, message: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(STOPPED_SCRIPT.replace("SECONDS", str(seconds)))
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.5)  # the ranks are in the call that takes long
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)  # ends when the last rank closes the pipe
    assert process.returncode == code
    assert errors == message
    assert not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    """Return False for a zombie too, which a container may never collect."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
