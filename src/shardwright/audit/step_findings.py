"""Findings of a step other than its gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwright.audit.mistakes.hypotheses import MistakeDiagnosis


@dataclass(frozen=True)
class StepFinding:
    """One comparison; `error` is relative. Passes if it is at most `allowed`."""

    quantity: str
    subject: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """True if the error is at most `allowed`; False for nan."""
        return self.error <= self.allowed


@dataclass(frozen=True)
class StepChecks:
    """Findings and diagnoses, and what could not be checked, in words."""

    findings: list[StepFinding]
    diagnoses: list[MistakeDiagnosis]
    unchecked: list[str]


def compare_numbers(value: float, expected: float) -> float:
    """Return the relative error; inf for nan."""
    error = abs(value - expected) / max(abs(expected), 1e-12)
    return math.inf if math.isnan(error) else error
