"""Assertions on the verifier's reports: a bug is detected by a wrong number, or all is equal."""

from __future__ import annotations

from shardwright.verification.verification import VerificationReport


def assert_detected(report: VerificationReport, quantity: str) -> None:
    """Fail unless the only cell fails by a wrong number, in the comparison of `quantity`."""
    (cell,) = report.cells
    assert not report.passed
    assert cell.failure is None, f"an error instead of a wrong number: {cell.failure}"
    failed = {finding.quantity for finding in cell.findings if not finding.passed}
    assert quantity in failed, failed


def assert_clean(report: VerificationReport) -> None:
    """Fail unless every comparison passes; the message lists failed comparisons and errors."""
    failed = [cell for cell in report.cells if not cell.passed]
    assert report.passed, [
        cell.failure or [found for found in cell.findings if not found.passed] for cell in failed
    ]
