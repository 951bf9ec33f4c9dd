"""The worker processes that all multi-process tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multiprocess.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks.run(n, function, *arguments)`: results by rank; a group of n workers starts at its first use."""
    with RankPool(timeout_seconds=60.0) as pool:
        yield pool
