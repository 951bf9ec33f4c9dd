"""The rank pool: results by rank, errors with rank and traceback, failed or blocked ranks, and
use after a failure.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

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
