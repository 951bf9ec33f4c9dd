"""What all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def outside_data() -> Path:
    """The folder named by SHARDWRIGHT_DATA; a test that asks for it skips, by name, without it."""
    folder = os.environ.get("SHARDWRIGHT_DATA")
    if not folder:
        pytest.skip("SHARDWRIGHT_DATA is not set: outside data is absent")
    return Path(folder)
