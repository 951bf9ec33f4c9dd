"""What all tests share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Wall-clock deadlines fail on a busy machine, not on a slow function.
settings.register_profile("shardwright", deadline=None)
settings.load_profile("shardwright")


SEVERAL_PROCESSES = ("tests/multiprocess/", "tests/faults/")
"""Tests that start ranks: one after another, on one set of workers. The others run beside them."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One of pytest-xdist's workers runs all tests that start ranks; the others go wherever there is room.

    What `--dist loadgroup` would do, whose marks get lost: xdist 3.8 writes them into an attribute that pytest 9.2 no longer reads.
    """
    from xdist.scheduler import LoadScopeScheduling

    class RanksTogether(LoadScopeScheduling):  # type: ignore[misc, unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            return "ranks" if nodeid.startswith(SEVERAL_PROCESSES) else nodeid

    return RanksTogether(config, log)


@pytest.fixture(scope="session")
def outside_data() -> Path:
    """The folder named by SHARDWRIGHT_DATA; a test that asks for it skips, by name, without it."""
    folder = os.environ.get("SHARDWRIGHT_DATA")
    if not folder:
        pytest.skip("SHARDWRIGHT_DATA is not set: outside data is absent")
    return Path(folder)
