"""docs/audit/known-bugs.md has every known bug, keys that exist, and the tests that plant them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwright.audit.mistakes.mistake_table import MISTAKES
from tests.unit.audit.test_hypotheses import PLANTED
from tests.unit.audit.test_preference_pairs import PAIR_MISTAKES
from tests.unit.audit.test_router_losses import FACTORS, FITTED_MISTAKES, SHARED_FACTORS
from tests.unit.audit.test_wrong_computations import EXPERT_MISTAKES

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/audit/known-bugs.md"
WITH_RANKS = ROOT / "tests/multiprocess/test_audit.py"
PLANTED_BY: dict[str, set[str]] = {
    "test_hypotheses": {mistake for run in PLANTED for mistake in run.mistakes},
    "test_preference_pairs": {*PAIR_MISTAKES},
    "test_router_losses": {*FACTORS, *SHARED_FACTORS, *FITTED_MISTAKES},
    "test_wrong_computations": {*EXPERT_MISTAKES},
    "test_parameter_places": {"experts_mixed"},
    "test_audit": set(re.findall(r'"(\w+)"', WITH_RANKS.read_text(encoding="utf-8"))) & {*MISTAKES},
}
"""Mistakes by the test module that plants them and expects their names."""
VERDICTS = {"named", "seen", "refused", "not in a step"}
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| bug ")
]


def test_every_known_bug_has_a_row() -> None:
    numbers = [int(row[0].split()[0]) for row in ROWS if not row[0].startswith("-")]
    assert numbers == list(range(1, 51))
    without_number = {row[1] for row in ROWS if row[0].startswith("-")}
    assert without_number == {"titan 2972", "titan 3412", "Automodel 2995", "titan 2318"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_named_bug_has_keys_of_the_table_and_another_a_reason(row: list[str]) -> None:
    _, _, verdict, text, planted_by = row
    assert verdict in VERDICTS
    keys = set(re.findall(r"`([a-z_]+)`", text))
    assert keys <= set(MISTAKES)
    modules = [name for name, planted in PLANTED_BY.items() if keys & planted]
    assert planted_by == ", ".join(f"`{name}`" for name in modules)
    if verdict == "named":
        assert keys
        assert keys <= set().union(*(PLANTED_BY[name] for name in modules))
    else:
        assert len(text.split()) > 5


def test_every_mistake_of_the_table_is_planted() -> None:
    assert set().union(*PLANTED_BY.values()) == set(MISTAKES)


def test_links_of_mistakes_are_those_of_the_page() -> None:
    """A mistake that links to a bug of the page is one of the bug's keys."""
    rows_of: dict[tuple[str, str], set[str]] = {}
    for _, seen_in, _, text, _ in ROWS:
        for project, numbers in re.findall(r"([\w-]+) ([\da-f]+(?:, [\da-f]+)*)", seen_in):
            for number in numbers.split(", "):
                keys = re.findall(r"`([a-z_]+)`", text)
                rows_of.setdefault((project, number), set()).update(keys)
    missing = {
        (key, bug)
        for key, mistake in MISTAKES.items()
        for bug in mistake.bugs
        for project, number in [bug.rsplit(" ", 1)]
        if key not in rows_of.get((project, number), {key})
    }
    assert not missing
