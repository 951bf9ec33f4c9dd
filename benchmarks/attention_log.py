"""Record which attention kernels a decoder takes, from its log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_PREFIX = "attention: "


@contextmanager
def record_attention() -> Iterator[list[str]]:
    """Collect the lines about attention, each choice with its reason, as they are logged."""
    lines: list[str] = []

    def emit(record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith(_PREFIX):
            lines.append(text.removeprefix(_PREFIX))

    handler = logging.Handler()
    handler.emit = emit  # type: ignore[method-assign]
    logger = logging.getLogger("shardwright")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
