"""The pools of worker processes that all multi-process tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multiprocess.nccl_order.pool import OrderedRankPool
from tests.multiprocess.pool import RankPool, SharedReferencePool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Return the pool that all tests share; `ranks.run(n, function, *arguments)` returns
    results by rank.

    A group of n workers starts at its first use.
    """
    # Long enough for a busy machine, and below the limit of a test (600 s), so that it also ends
    # hangs.
    with SharedReferencePool(timeout_seconds=280.0) as pool:
        yield pool


@pytest.fixture(scope="session")
def gloo_ranks() -> Iterator[RankPool]:
    """Return the pool of tests that read PyTorch's record of operations, which has only gloo's."""
    with SharedReferencePool(timeout_seconds=280.0, backend="gloo") as pool:
        yield pool


@pytest.fixture(scope="session")
def ordered_ranks() -> Iterator[OrderedRankPool]:
    """Return the pool whose ranks run in NCCL's order; a test fails where they would deadlock."""
    with OrderedRankPool(timeout_seconds=280.0) as pool:
        yield pool
