"""Plugin of pytest that gives a session the device (`python -m pytest -p tests.hostcuda.plugin`).

A test fails if nothing orders two accesses of different streams to the same memory. Of `tests/gpu`,
only the tests on CUDA run: those on a CPU need no device.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostcuda import device

device.activate()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of `tests/gpu` that run on a CPU."""
    on_cpu = [
        item
        for item in items
        if item.nodeid.startswith("tests/gpu/") and item.get_closest_marker("gpu") is None
    ]
    items[:] = [item for item in items if item not in on_cpu]
    config.hook.pytest_deselected(items=on_cpu)


@pytest.fixture(autouse=True)
def ordered_streams() -> Iterator[None]:
    """Fail the test on violations of the stream model that no operation could raise."""
    yield
    violations = device.list_violations()
    assert not violations, violations
