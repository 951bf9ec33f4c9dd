"""Plugin of pytest that gives a session the device (`python -m pytest -p tests.hostcuda.plugin`).

A test fails if nothing orders two accesses of different streams to the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostcuda import device

device.activate()


@pytest.fixture(autouse=True)
def ordered_streams() -> Iterator[None]:
    """Fail the test on violations of the stream model that no operation could raise."""
    yield
    violations = device.list_violations()
    assert not violations, violations
