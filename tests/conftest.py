"""What all tests share."""

from __future__ import annotations

import operator
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported. tests/forked.py forks programs only if they have the same value.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What reads a clock fails on a busy machine, not on a slow function. The examples of a run are
# those of the run before, so that what a change broke shows when it is made; `make test-all`
# (--hypothesis-profile=exploring) looks for new ones.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("shardwright", PATIENT, derandomize=True)
settings.register_profile("exploring", PATIENT)
settings.load_profile("shardwright")


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order() -> None:
    """What a test draws without a seed of its own does not depend on the tests that its worker ran
    before.
    """
    random.seed(0)
    for name, seed in (("numpy", "random.seed"), ("torch", "manual_seed")):
        if name in sys.modules:  # importing it would take seconds from tests that need none
            operator.attrgetter(seed)(sys.modules[name])(0)


SEVERAL_PROCESSES = ("tests/multiprocess/", "tests/faults/")
"""Tests with ranks."""
SECOND_HALF = (
    "tests/faults/",
    "tests/multiprocess/test_grid.py",
    "tests/multiprocess/test_train_command.py",
    "tests/multiprocess/test_train_experts.py",
    "tests/multiprocess/test_verify.py::test_the_verb",
    "tests/multiprocess/test_wrong_input.py",
)
"""Those among them that start processes of their own, and mostly import, and the longest of those
that share a pool of ranks, and mostly compute: half of the time of all."""
OTHER_PROCESSES = frozenset({"subprocess", "threading", "socket", "forked"})
"""Of what a test's module imports: its outcome hangs on when the machine lets others run."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What depends on other processes may fail once, and is told by name:
    docs/decisions/0050-tests-tried-twice.md.
    """
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return
    for item in items:
        starts_some = isinstance(item, pytest.Function) and not OTHER_PROCESSES.isdisjoint(
            vars(item.module)
        )
        if item.nodeid.startswith(SEVERAL_PROCESSES) or starts_some:
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One of pytest-xdist's workers runs one half of the tests with ranks, another one the other;
    the rest go where there is room.

    What `--dist loadgroup` would do, whose marks get lost: xdist 3.8 writes them into an attribute
    that pytest 9.2 no longer reads.
    """
    from xdist.scheduler import LoadScopeScheduling

    class RanksTogether(LoadScopeScheduling):  # type: ignore[misc, unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(SECOND_HALF):
                return "ranks, second half"
            return "ranks" if nodeid.startswith(SEVERAL_PROCESSES) else nodeid

    return RanksTogether(config, log)


@pytest.fixture(scope="session")
def outside_data() -> Path:
    """The folder named by SHARDWRIGHT_DATA; a test that asks for it skips, by name, without it."""
    folder = os.environ.get("SHARDWRIGHT_DATA")
    if not folder:
        pytest.skip("SHARDWRIGHT_DATA is not set: outside data is absent")
    return Path(folder)
