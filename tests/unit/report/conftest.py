"""Shared fixtures of tests of pages: a run with every kind of event (read only), a browser."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.unit.report.samples import write_eventful_run


@pytest.fixture(scope="session")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_eventful_run(tmp_path_factory.mktemp("runs") / "eventful")


@pytest.fixture(scope="session")
def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        path = shutil.which(name)
        if path:
            return path
    pytest.skip("no Chromium on this machine: the page was not opened in a browser")
