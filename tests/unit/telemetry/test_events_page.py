"""docs/events.md documents exactly the kinds and fields of the event schema."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from shardwright.telemetry.event_types import EVENT_TYPES, SCHEMA_VERSION, Event

PAGE = (Path(__file__).parents[3] / "docs" / "events.md").read_text(encoding="utf-8")
ROWS = dict(
    re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.partition("## Kinds")[2], flags=re.MULTILINE)
)
ENVELOPE = {field.name for field in fields(Event)}


def test_the_page_has_exactly_the_kinds_and_the_version() -> None:
    assert set(ROWS) == set(EVENT_TYPES)
    assert f"| `schema_version` | {SCHEMA_VERSION} |" in PAGE


@pytest.mark.parametrize("kind", EVENT_TYPES)
def test_the_page_has_every_field_and_optional_ones_in_italics(kind: str) -> None:
    named = set(re.findall(r"`([a-z0-9_]+)`", ROWS[kind]))
    italic = set(re.findall(r"\*`([a-z0-9_]+)`\*", ROWS[kind]))
    own = [field for field in fields(EVENT_TYPES[kind]) if field.name not in ENVELOPE]
    assert {field.name for field in own} <= named
    optional = {
        field.name for field in own if field.default is not MISSING and field.default in (None, ())
    }
    assert italic == optional
