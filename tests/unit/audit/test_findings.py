"""The page of findings has the rows of its table; the long suite runs those that can run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.audit_findings import EXAMPLES, PAGE, run_row
from benchmarks.audit_rows import ROWS, FindingRow


def test_the_page_has_every_row_once_and_no_other() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("## What these rows do not compare")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE) == [row.name for row in ROWS]


def test_a_row_that_differs_is_explained_and_no_other() -> None:
    for row in ROWS:
        assert (EXAMPLES / f"{row.example}.py").is_file()
        assert bool(row.expected) == bool(row.verdict) == bool(row.cause), row.name


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_released_trainer_equals_the_page(row: FindingRow, tmp_path: Path) -> None:
    if missing := row.list_missing_packages():
        pytest.skip(f"{', '.join(missing)} is not installed")
    run_row(row, tmp_path)
