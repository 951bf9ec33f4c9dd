"""The pool of worker processes that all multi-process tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multiprocess.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Return the pool that all tests share; `ranks.run(n, function, *arguments)` returns
    results by rank.

    A group of n workers starts at its first use.
    """
    # Long enough for a busy machine, and below the limit of a test (600 s), so that it also ends
    # hangs.
    with RankPool(timeout_seconds=280.0) as pool:
        yield pool
