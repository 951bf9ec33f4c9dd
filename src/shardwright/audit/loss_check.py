"""Check of the loss that a trainer reports for a recorded step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardwright.audit.evidence import Evidence
from shardwright.audit.mistakes.hypotheses import MistakeDiagnosis
from shardwright.audit.mistakes.shared_rows import list_sharing_degrees
from shardwright.audit.mistakes.weightings import (
    compute_objective_weights,
    compute_router_weights,
    iterate_normalisers,
    iterate_omissions,
    iterate_router_factors,
)
from shardwright.audit.step_findings import StepChecks, StepFinding, compare_numbers

LOSS_TOLERANCE = 1e-4
"""Allowed relative error of a loss; trainers log four or five digits."""


def check_loss(evidence: Evidence, checks: StepChecks) -> None:
    """Compare the loss that the trainer reports, and name the mistake in it."""
    reported = [rank.values.get("reported_loss") for rank in evidence.record.ranks]
    given = [float(value) for value in reported if value is not None]
    if not given:
        checks.unchecked.append("loss: the trainer reported none; pass after_step(loss=...)")
        return
    counts = evidence.count(evidence.reading)
    losses = evidence.compute_losses(evidence.reading)
    allowed = _get_loss_tolerance(evidence)
    router = _list_router_losses(evidence)
    right = float((compute_objective_weights(evidence.objective, counts) * losses).sum())
    # Some trainers report the loss without the routers' part, which is no mistake.
    accepted = {"as reported": right + router[()]}
    if evidence.has_router_loss:
        accepted["as reported, without the router's auxiliary loss"] = right
    subject, error = min(
        ((name, max(compare_numbers(v, value) for v in given)) for name, value in accepted.items()),
        key=lambda pair: pair[1],
    )
    checks.findings.append(StepFinding("loss", subject, error, allowed))
    if checks.findings[-1].passed:
        return
    own = [float(losses[r].sum() / counts.supervised[r].sum()) for r in range(len(losses))]
    by_rank = [
        (float(value), own[sorted(_list_data_ranks(evidence)).index(rank.values["data_rank"])])
        for rank, value in zip(evidence.record.ranks, reported, strict=True)
        if value is not None
    ]
    if len(own) > 1 and all(compare_numbers(value, mean) <= allowed for value, mean in by_rank):
        checks.diagnoses.append(
            MistakeDiagnosis(("own_loss_reported",), "loss as reported", error, allowed)
        )
        return
    for normaliser in iterate_normalisers(counts, evidence.objective):
        for omission in iterate_omissions(counts):
            for wrong, added in router.items():
                mistakes = (*normaliser.mistakes, *omission.mistakes, *wrong)
                weights = normaliser.weights * omission.weights
                value = float((weights * losses).sum()) + added
                after = max(compare_numbers(each, value) for each in given)
                is_single = len(mistakes) == 1 or mistakes == wrong
                if mistakes and is_single and after <= allowed:
                    checks.diagnoses.append(
                        MistakeDiagnosis(mistakes, "loss as reported", error, after)
                    )
                    return
    _diagnose_shared_loss(evidence, checks, given, right + router[()])


def _diagnose_shared_loss(
    evidence: Evidence, checks: StepChecks, given: Sequence[float], right: float
) -> None:
    """Name a loss that ranks with the same rows have counted more or less than once."""
    error = max(compare_numbers(value, right) for value in given)
    for degree in list_sharing_degrees(evidence):
        for key, value in (
            ("multiplied_by_sharing_ranks", degree * right),
            ("divided_by_sharing_ranks", right / degree),
            ("log_ranks_added", right + math.log(degree)),
        ):
            after = max(compare_numbers(each, value) for each in given)
            if after <= _get_loss_tolerance(evidence):
                subject = f"loss as reported, {degree} ranks"
                checks.diagnoses.append(MistakeDiagnosis((key,), subject, error, after))
                return


def _list_router_losses(evidence: Evidence) -> dict[tuple[str, ...], float]:
    """List the routers' part of the loss: the correct one under (), then mistaken ones."""
    if not evidence.has_router_loss:
        return {(): 0.0}
    counts = evidence.count(evidence.reading)
    losses = compute_router_weights(counts) * evidence.compute_router_pieces()[0]
    wrong = {names: float((f * losses).sum()) for names, f in iterate_router_factors(counts)}
    return {(): float(losses.sum())} | wrong


def _list_data_ranks(evidence: Evidence) -> set[int]:
    return {rank.values["data_rank"] for rank in evidence.record.ranks}


def _get_loss_tolerance(evidence: Evidence) -> float:
    dtype = evidence.record.values["compute_dtype"] or "float32"
    return max(LOSS_TOLERANCE, 4 * torch.finfo(getattr(torch, str(dtype))).eps)
