"""The worker processes that all multi-process tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multiprocess.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks.run(n, function, *arguments)`: results by rank; a group of n workers starts at its
    first use.
    """
    # Not to be short of time on a machine that does much else: a hang is found by it too, under the
    # limit of a test (600 s).
    with RankPool(timeout_seconds=280.0) as pool:
        yield pool
