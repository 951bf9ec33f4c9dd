"""Log messages during a progress bar."""

from __future__ import annotations

import logging

import pytest

from shardwright.cli.output.data_progress import show_data_progress


def test_warnings_are_shown_after_the_bar(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("shardwright.data.sources.file_listing")
    with caplog.at_level(logging.INFO, logger="shardwright"):
        with show_data_progress():
            log.warning("a file was passed over")
            log.info("a detail")
            assert not caplog.messages
        log.warning("after")
    assert caplog.messages == ["a file was passed over", "after"]
