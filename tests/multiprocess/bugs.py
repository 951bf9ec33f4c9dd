"""Bugs that are put back on purpose, and what it means that the verifier sees them; what the tests
of all mutations share.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from shardwright.layout import Layout
from shardwright.verify.cases import VerificationCase
from shardwright.verify.cell import MutationContext
from shardwright.verify.verification import VerificationReport


class Bug(NamedTuple):
    """A mutation, a cell that must catch it, and the comparison that does."""

    mutation: MutationContext
    layout: Layout
    case: VerificationCase
    caught_by: str


class ModelBug(NamedTuple):
    """A mutation, the model and cell that must catch it, and the comparison that does."""

    mutation: MutationContext
    config: dict[str, Any]
    layout: Layout
    case: VerificationCase
    caught_by: str


def assert_caught(report: VerificationReport, caught_by: str) -> None:
    """Fail unless the one cell fails by a wrong number, and in this comparison."""
    (cell,) = report.cells
    assert not report.passed
    assert cell.failure is None, f"it broke, where a wrong number was wanted: {cell.failure}"
    failed = {finding.quantity for finding in cell.findings if not finding.passed}
    assert caught_by in failed, failed


def assert_clean(report: VerificationReport) -> None:
    """Fail unless every comparison passes; what failed is told, or why a cell broke off."""
    failed = [cell for cell in report.cells if not cell.passed]
    assert report.passed, [
        cell.failure or [found for found in cell.findings if not found.passed] for cell in failed
    ]
