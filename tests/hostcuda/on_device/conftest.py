"""Ranks with the test device."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import forkserver

import pytest

from shardwright.verification.rank_pool import RankPool


@pytest.fixture(scope="session")
def device_ranks() -> Iterator[RankPool]:
    """Return a pool whose ranks have the device; their collectives run on gloo."""
    forkserver.set_forkserver_preload(["tests.hostcuda.activate", "tests.hostcuda.whole_runs"])
    forkserver.ensure_running()  # before the pool sets its own imports
    with RankPool(timeout_seconds=120.0, backend="gloo") as pool:
        yield pool


@pytest.fixture
def own_device_ranks(device_ranks: RankPool) -> Iterator[RankPool]:
    """Return a pool for one test, whose ranks fail in the middle of a step.

    The other pool has prepared the server of its processes, which then have the device.
    """
    with RankPool(timeout_seconds=120.0, backend="gloo") as pool:
        yield pool
