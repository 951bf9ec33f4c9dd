"""Check of a recorded step: compare it with one process, and diagnose what differs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardwright.audit.errors import AuditInputError
from shardwright.audit.evidence import Evidence, gather_evidence
from shardwright.audit.mistakes.hypotheses import MistakeDiagnosis, diagnose
from shardwright.audit.preference import PreferenceSettings
from shardwright.audit.record import load_step
from shardwright.audit.reference import ReferenceModel
from shardwright.audit.step_check import check_step
from shardwright.audit.step_findings import StepChecks, StepFinding
from shardwright.errors import InputError, RunFailed

SCHEMA_VERSION = 1
DTYPES = ("float32", "float64")
_DECODER_TOLERANCE = {"float32": 1e-3, "float64": 1e-7}
"""Largest relative difference between the two references."""


@dataclass(frozen=True)
class ParameterResult:
    """Comparison of one parameter's gradient; `allowed` is the rounding error to expect."""

    name: str
    error: float
    allowed: float
    recorded_norm: float
    expected_norm: float

    @property
    def passed(self) -> bool:
        """True if rounding explains the difference."""
        return self.error <= self.allowed

    @property
    def severity(self) -> float:
        """Error divided by the allowed error."""
        return self.error / self.allowed


@dataclass(frozen=True)
class AuditReport:
    """Result of an audit."""

    folder: str
    step: int
    num_ranks: int
    num_data_ranks: int
    num_micro_batches: int
    num_terms: int
    """Terms of the loss: supervised tokens; for `dpo` pairs."""
    objective: str
    dtype: str
    expected_loss: float
    residual: float
    """Norm of the difference of all gradients over that of the recorded ones."""
    parameters: list[ParameterResult]
    findings: list[StepFinding]
    diagnoses: list[MistakeDiagnosis]
    unchecked: list[str] = field(default_factory=list)
    projections: int | None = None

    @property
    def term_unit(self) -> str:
        """Unit of `num_terms`, in words."""
        return "pairs" if self.objective == "dpo" else "supervised tokens"

    @property
    def passed(self) -> bool:
        """True if every gradient and every other comparison passes."""
        return all(p.passed for p in self.parameters) and all(f.passed for f in self.findings)

    @property
    def worst_parameters(self) -> list[ParameterResult]:
        """Parameters by severity, the worst first."""
        return sorted(self.parameters, key=lambda result: -result.severity)

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the JSON output; infinite errors become null."""
        return {
            "schema_version": SCHEMA_VERSION,
            "passed": self.passed,
            "folder": self.folder,
            "step": self.step,
            "ranks": self.num_ranks,
            "data_ranks": self.num_data_ranks,
            "micro_batches": self.num_micro_batches,
            self.term_unit.replace(" ", "_"): self.num_terms,
            "objective": self.objective,
            "dtype": self.dtype,
            "expected_loss": self.expected_loss,
            "residual": _to_json(self.residual),
            "projections": self.projections,
            "parameters": [
                {
                    "name": p.name,
                    "error": _to_json(p.error),
                    "allowed": p.allowed,
                    "recorded_norm": _to_json(p.recorded_norm),
                    "expected_norm": p.expected_norm,
                    "passed": p.passed,
                }
                for p in self.worst_parameters
            ],
            "findings": [
                {
                    "quantity": f.quantity,
                    "subject": f.subject,
                    "error": _to_json(f.error),
                    "allowed": f.allowed,
                    "passed": f.passed,
                }
                for f in self.findings
            ],
            "diagnoses": [
                {
                    "mistakes": list(d.keys),
                    "titles": [mistake.title for mistake in d.mistakes],
                    "remedies": [mistake.remedy for mistake in d.mistakes],
                    "links": _list_links(d),
                    "subject": d.subject,
                    "residual_before": _to_json(d.residual_before),
                    "residual_after": _to_json(d.residual_after),
                    "alternatives": [list(keys) for keys in d.alternatives],
                    "note": d.note,
                }
                for d in self.diagnoses
            ],
            "unchecked": self.unchecked,
        }


def check_recorded_step(
    folder: Path,
    *,
    step: int | None = None,
    model_path: Path | None = None,
    objective: str = "mean_tokens",
    dtype: str = "float32",
    preference: PreferenceSettings | None = None,
) -> AuditReport:
    """Compare a recorded step with one process.

    Args:
        folder: The recorder's folder, or that of a step.
        step: Number of the step; needed if several are recorded.
        model_path: Hugging Face folder with the weights before the step; default the record's.
        objective: Definition of the loss, one of `weightings.OBJECTIVES`.
        dtype: Precision of the recomputation, float32 or float64.
        preference: Settings of the objective `dpo`, and only of it.

    Raises:
        AuditInputError: a folder that is damaged, incomplete or does not fit the model.
        InputError: an unknown objective or dtype, preference settings missing or not used.
        RunFailed: our own decoder does not agree with transformers.
    """
    if dtype not in DTYPES:
        raise InputError("unknown dtype", field="--dtype", got=dtype, allowed=", ".join(DTYPES))
    _check_preference(objective, preference)
    record = load_step(folder, step)
    model = ReferenceModel(record, model_path, dtype, preference)
    evidence = gather_evidence(record, model, objective)
    counts = evidence.count(evidence.reading)
    if not counts.labels.sum():
        raise AuditInputError(
            "no token of this step is supervised", field=str(folder), remedy="Record another step"
        )
    _compare_references(evidence)
    expected = evidence.compute_expected()
    diagnoses = diagnose(evidence)
    checks = check_step(evidence)
    return AuditReport(
        folder=str(folder),
        step=record.values["step"],
        num_ranks=len(record.ranks),
        num_data_ranks=len(evidence.data),
        num_micro_batches=int(counts.exists.sum()),
        num_terms=int(counts.supervised.sum()),
        objective=objective,
        dtype=dtype,
        expected_loss=evidence.compute_expected_loss(),
        residual=max(evidence.compute_residual(copy, expected) for copy in evidence.copies),
        parameters=_list_results(evidence, expected),
        findings=checks.findings,
        diagnoses=_merge_diagnoses(diagnoses, checks),
        unchecked=checks.unchecked,
        projections=model.num_projections,
    )


def _merge_diagnoses(
    diagnoses: Iterable[MistakeDiagnosis], checks: StepChecks
) -> list[MistakeDiagnosis]:
    """List the diagnoses of the gradients first."""
    return [*diagnoses, *checks.diagnoses]


def _check_preference(objective: str, preference: PreferenceSettings | None) -> None:
    """Check that a preference loss has its settings, and no other loss has."""
    if objective == "dpo" and preference is None:
        raise InputError(
            "the DPO loss needs --beta",
            field="--beta",
            remedy="Give --beta as the trainer has it; --label-smoothing too if it is not 0",
        )
    if objective != "dpo" and preference is not None:
        raise InputError(
            "a loss of tokens has no beta and no reference model",
            field="--objective",
            got=objective,
            allowed="dpo",
        )


def _list_results(evidence: Evidence, expected: torch.Tensor) -> list[ParameterResult]:
    copies = [evidence.compute_errors(copy, expected) for copy in evidence.copies]
    recorded = evidence.recorded
    return [
        ParameterResult(
            name,
            max(errors[name] for errors in copies),
            evidence.relative_errors[name],
            float(recorded[part].norm()),
            float(expected[part].norm()),
        )
        for name, part in evidence.model.slices.items()
    ]


def _compare_references(evidence: Evidence) -> None:
    """Check that our own decoder computes the same gradients as transformers' class."""
    for batches in evidence.data:
        ours = evidence.model.compute_decoder_gradient(batches[0], evidence.reading)
        if ours is None:
            return
        reference = evidence.model.compute_token_gradient(batches[0], evidence.reading)
        error = evidence.compute_residual(ours, reference)
        if error > _DECODER_TOLERANCE[str(evidence.model.dtype).removeprefix("torch.")]:
            raise RunFailed(
                f"the two references disagree by {error:.1e}: our decoder and transformers' "
                f"{type(evidence.model.module).__name__}; the trainer is not judged"
            )


def _list_links(diagnosis: MistakeDiagnosis) -> list[str]:
    return list(dict.fromkeys(link for mistake in diagnosis.mistakes for link in mistake.links))


def _to_json(value: float) -> float | None:
    return value if value == value and abs(value) != float("inf") else None
