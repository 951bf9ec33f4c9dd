"""Settings and fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import random
import socket
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Set before torch is imported. tests/forked.py forks programs only if they have the same values.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Otherwise every process that compiles starts workers of its own, which import torch.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Deadlines fail on a busy machine, not on a slow function. Every run has the same examples, so that
# a failure points to the change that causes it; `make test-all` (--hypothesis-profile=exploring)
# looks for new ones.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("shardwright", UNTIMED, derandomize=True)
settings.register_profile("exploring", UNTIMED)
settings.load_profile("shardwright")


@pytest.fixture(autouse=True)
def _seed_generators() -> None:
    """Seed all generators, so that random numbers of a test do not depend on earlier tests."""
    random.seed(0)
    if "numpy" in sys.modules:  # importing it would take seconds from tests that need none
        sys.modules["numpy"].random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        # Without a GPU, `torch.manual_seed` formats the whole stack for each kind of device.
        has_cuda = torch.cuda.is_available()
        (torch.manual_seed if has_cuda else torch.default_generator.manual_seed)(0)


@pytest.fixture(autouse=True, scope="module")
def _freeze_imports() -> None:
    """Exclude what exists from garbage collection.

    Every training run collects, which takes most of a second with the objects of all imports.
    """
    module = sys.modules.get("shardwright.training.garbage_collection")
    if module is not None:  # its runs need to know
        module.freeze_imports()
    else:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _restore_environment() -> Iterator[None]:
    """Undo what a test, or a command that it calls, changes in the environment.

    tests/forked.py starts a program instead of forking it once a variable that is read on import
    has changed, so that the tests of forks would depend on the tests before them.
    """
    before = dict(os.environ)
    yield
    if before != os.environ:
        os.environ.clear()
        os.environ.update(before)


class _Argument:
    """Object that can be weakly referenced."""


def _outlives_its_last_use(argument: object) -> bool:
    reference = weakref.ref(argument)
    del argument
    return reference() is not None


@pytest.fixture(autouse=True)
def _check_frame_evaluation() -> Iterator[None]:
    """Fail a test after which torch.compile still evaluates frames, as after a failed compilation.

    Callers would keep the arguments of their calls, and later tests measure more memory.
    """
    was_on = _outlives_its_last_use(_Argument())
    yield
    is_on = _outlives_its_last_use(_Argument())  # a call in an `assert` keeps its arguments
    assert was_on or not is_on, (
        "torch.compile still evaluates frames; run what fails to compile in a process of its own"
    )


SEVERAL_PROCESSES = (
    "tests/multiprocess/",
    "tests/faults/",
    "tests/slurm/",
    "tests/object_store/test_training.py",
)
"""Folders of tests that start ranks."""
SECOND_HALF = (
    "tests/faults/",
    "tests/slurm/",
    "tests/multiprocess/test_grid.py",
    "tests/multiprocess/test_train_command.py",
    "tests/multiprocess/test_train_experts.py",
    "tests/multiprocess/test_verify.py::test_the_verb",
    "tests/multiprocess/test_wrong_input.py",
)
"""Half of these tests by time: those that start their own processes and mostly import, and the
longest of those that share a pool of ranks and mostly compute."""
OTHER_PROCESSES = frozenset({"subprocess", "threading", "socket", "forked"})
"""Imports of test modules whose outcome depends on the scheduling of other processes."""


def rank_by_length(item: pytest.Item) -> int:
    """Return the place of a test in the run.

    The longest scopes come first, so that both workers end with short ones: one takes the session
    of the test device and then the second half of the tests with ranks, the other the first half.
    """
    if item.nodeid.startswith("tests/hostcuda/"):
        return 0
    if item.nodeid.startswith(SECOND_HALF):
        return 2
    return 1 if item.nodeid.startswith(SEVERAL_PROCESSES) else 3


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the longest tests first; repeat failed tests that depend on other processes once, and
    report them by name: docs/decisions/0050-tests-tried-twice.md.
    """
    items.sort(key=rank_by_length)
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return
    for item in items:
        starts_some = isinstance(item, pytest.Function) and not OTHER_PROCESSES.isdisjoint(
            vars(item.module)
        )
        if item.nodeid.startswith(SEVERAL_PROCESSES) or starts_some:
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while imports and tests, which all stay, are created."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Use an empty cache; send the counts of repeated tests at once.

    The user's cache may have step times that `tune` measured, which decide `layout: auto`.

    The plugin for repeats writes one message after another before it reads, which Nagle's algorithm
    and delayed acknowledgements make a wait of 40 ms for every test that may be repeated.
    """
    if not hasattr(config, "workerinput"):  # the workers of pytest-xdist inherit it
        cache = TemporaryDirectory(prefix="shardwright-cache-", ignore_cleanup_errors=True)
        os.environ["SHARDWRIGHT_CACHE"] = cache.name
        config.add_cleanup(cache.cleanup)
    connection = getattr(getattr(config, "failures_db", None), "sock", None)
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Assign each half of the tests with ranks to one worker of pytest-xdist, others to any worker.

    `--dist loadgroup` would do this, but its marks get lost: xdist 3.8 writes them into an
    attribute that pytest 9.2 no longer reads.
    """
    from xdist.scheduler import LoadScopeScheduling

    class RanksTogether(LoadScopeScheduling):  # type: ignore[misc, unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(SECOND_HALF):
                return "ranks, second half"
            return "ranks" if nodeid.startswith(SEVERAL_PROCESSES) else nodeid

    config.option.loadscopereorder = False  # by numbers of tests: the longest are few
    return RanksTogether(config, log)


@pytest.fixture(scope="session")
def outside_data() -> Path:
    """Folder named by SHARDWRIGHT_DATA; tests that need it are skipped without it."""
    folder = os.environ.get("SHARDWRIGHT_DATA")
    if not folder:
        pytest.skip("SHARDWRIGHT_DATA is not set: outside data is absent")
    return Path(folder)
