"""What all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Wall-clock deadlines fail on a busy machine, not on a slow function.
settings.register_profile("shardwright", deadline=None)
settings.load_profile("shardwright")


SEVERAL_PROCESSES = ("tests/multiprocess", "tests/faults")
"""Tests that start ranks: one after another, on one set of workers. The others run beside them."""


@pytest.hookimpl(tryfirst=True)  # before xdist's own, which reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(config.rootpath).as_posix().startswith(SEVERAL_PROCESSES):
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session")
def outside_data() -> Path:
    """The folder named by SHARDWRIGHT_DATA; a test that asks for it skips, by name, without it."""
    folder = os.environ.get("SHARDWRIGHT_DATA")
    if not folder:
        pytest.skip("SHARDWRIGHT_DATA is not set: outside data is absent")
    return Path(folder)
