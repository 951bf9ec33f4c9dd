"""Diagnosis by hypothesis: compute the gradients of known mistakes, and find the recorded ones.

A hypothesis is a function from the evidence to candidates: gradients, and the mistakes that lead
to them. The candidates with the fewest mistakes that equal the recorded gradient are reported.

Shapes: P numbers of all compared gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.audit.batch_reading import BatchReading
from shardwright.audit.evidence import Evidence
from shardwright.audit.mistakes.candidates import GradientCandidate, find_wrong
from shardwright.audit.mistakes.computation_mistakes import (
    iterate_faults,
    iterate_router_computations,
    iterate_smoothing,
)
from shardwright.audit.mistakes.mistake_table import MISTAKES, Mistake
from shardwright.audit.mistakes.parameter_mistakes import (
    iterate_added_parameters,
    iterate_parameter_mistakes,
)
from shardwright.audit.mistakes.shared_rows import (
    iterate_context_means,
    iterate_shared_factors,
    iterate_shared_router_losses,
)
from shardwright.audit.mistakes.weightings import (
    compute_objective_weights,
    iterate_normalisers,
    iterate_omissions,
    iterate_router_factors,
)
from shardwright.audit.mistakes.wrong_readings import list_reading_mistakes, list_readings

_LOW_PRECISION_RATIO = 0.4
"""Residual after over before, for a mistake that is itself a rounding error."""


@dataclass(frozen=True)
class MistakeDiagnosis:
    """Known mistakes that reproduce the recorded step.

    `residual_before` and `residual_after` are relative norms of the difference without and with
    the mistakes. `alternatives` are mistakes with the same effect on this step.
    """

    keys: tuple[str, ...]
    subject: str
    residual_before: float
    residual_after: float
    alternatives: tuple[tuple[str, ...], ...] = ()
    note: str = ""

    @property
    def mistakes(self) -> tuple[Mistake, ...]:
        """Rows of the table of mistakes."""
        return tuple(MISTAKES[key] for key in self.keys)


def iterate_weightings(evidence: Evidence, reading: BatchReading) -> Iterator[GradientCandidate]:
    """Yield wrong divisions and lost gradients, alone and in pairs."""
    counts = evidence.count(reading)
    own = list_reading_mistakes(evidence, reading)
    for normaliser in iterate_normalisers(counts, evidence.objective):
        for omission in iterate_omissions(counts):
            mistakes = (*own, *normaliser.mistakes, *omission.mistakes)
            if 0 < len(mistakes) <= 2:
                vector = evidence.combine(
                    reading,
                    normaliser.weights * omission.weights,
                    normaliser.router_factors * omission.weights,
                )
                yield GradientCandidate(mistakes, (vector,), omission.subject)


def iterate_unreduced(evidence: Evidence, reading: BatchReading) -> Iterator[GradientCandidate]:
    """Yield gradients that are not summed over ranks, wholly or for the last micro-batch."""
    counts = evidence.count(reading)
    num_ranks = len(evidence.data)
    if len(evidence.copies) != num_ranks or num_ranks == 1:
        return
    for normaliser in iterate_normalisers(counts, evidence.objective):
        parts = evidence.weight_pieces(reading, normaliser.weights)
        for scale in (float(num_ranks), 1.0):
            local = scale * parts.sum(1)
            yield GradientCandidate((*normaliser.mistakes, "not_reduced"), tuple(local))
            if parts.shape[1] > 1:
                early = parts[:, :-1].sum((0, 1))
                last = scale * parts[:, -1]
                mistakes = (*normaliser.mistakes, "last_micro_batch_not_reduced")
                yield GradientCandidate(mistakes, tuple(early + last))


def iterate_early_clips(evidence: Evidence, reading: BatchReading) -> Iterator[GradientCandidate]:
    """Yield means over ranks of gradients that each rank has clipped."""
    limit = find_max_norm(evidence)
    num_ranks = len(evidence.data)
    if limit is None or num_ranks == 1 or evidence.model.num_projections is not None:
        return
    for normaliser in iterate_normalisers(evidence.count(reading), evidence.objective):
        local = num_ranks * evidence.weight_pieces(reading, normaliser.weights).sum(1)
        clip = (limit / (local.norm(dim=1) + 1e-6)).clamp(max=1.0)
        vector = (clip[:, None] * local).mean(0)
        yield GradientCandidate((*normaliser.mistakes, "clipped_before_reduction"), (vector,))


def iterate_router_losses(evidence: Evidence, reading: BatchReading) -> Iterator[GradientCandidate]:
    """Yield routers' auxiliary losses with a wrong factor, alone or with a wrong division."""
    if not evidence.has_router_loss:
        return
    counts = evidence.count(reading)
    for normaliser in iterate_normalisers(counts, evidence.objective):
        for wrong, factors in iterate_router_factors(counts):
            mistakes = (*normaliser.mistakes, *wrong)
            if len(mistakes) <= 2:
                vector = evidence.combine(reading, normaliser.weights, factors)
                yield GradientCandidate(mistakes, (vector,))


def iterate_leftovers(evidence: Evidence, reading: BatchReading) -> Iterator[GradientCandidate]:
    """Yield the expected gradient plus gradients left over from before the step."""
    start = torch.zeros(evidence.model.num_values, dtype=evidence.model.dtype)
    found = False
    for name in evidence.model.names:
        if values := evidence.record.join("start", name):
            found = True
            start[evidence.model.slices[name]] = evidence.model.to_values(name, values[0])
    if found:
        yield GradientCandidate(("not_zeroed",), (evidence.compute_expected() + start,))


def iterate_low_precision(evidence: Evidence, reading: BatchReading) -> Iterator[GradientCandidate]:
    """Yield gradients that are accumulated over micro-batches in bf16."""
    if evidence.model.num_projections is not None:
        return
    weights = compute_objective_weights(evidence.objective, evidence.count(reading))
    num_ranks = len(evidence.data)
    parts = num_ranks * evidence.weight_pieces(reading, weights)
    # Only the accumulated gradient is rounded, or every addend too.
    for added_dtype in (evidence.model.dtype, torch.bfloat16):
        local = []
        for rank in range(num_ranks):
            total = torch.zeros(evidence.model.num_values, dtype=torch.bfloat16)
            for batch in range(weights.shape[1]):
                total += parts[rank, batch].to(added_dtype)
            local.append(total.to(evidence.model.dtype))
        vector = torch.stack(local).mean(0)
        yield GradientCandidate(("low_precision_accumulation",), (vector,))


HYPOTHESES: tuple[Callable[[Evidence, BatchReading], Iterator[GradientCandidate]], ...] = (
    iterate_weightings,
    iterate_router_losses,
    iterate_unreduced,
    iterate_early_clips,
    iterate_leftovers,
    iterate_shared_factors,
)


def diagnose(evidence: Evidence) -> list[MistakeDiagnosis]:
    """Find the mistakes that reproduce the recorded gradients; empty if none or not needed."""
    expected = evidence.compute_expected()
    if not find_wrong(evidence, (expected,)):
        return []
    for candidates in (
        _iterate_singles(evidence),
        iterate_parameter_mistakes(evidence, evidence.reading, expected, ()),
        _iterate_wrong_readings(evidence),
        iterate_context_means(evidence, evidence.reading),
        iterate_smoothing(evidence),
        iterate_router_computations(evidence),
        iterate_faults(evidence),
        _iterate_structures_of_weightings(evidence),
        _iterate_common_factor(evidence, expected),
    ):
        fitting = [c for c in candidates if not find_wrong(evidence, c.copies)]
        if fitting:
            return [_build_diagnosis(evidence, expected, fitting)]
    before = evidence.compute_residual(evidence.recorded, expected)
    for candidate in iterate_low_precision(evidence, evidence.reading):
        after = evidence.compute_residual(evidence.recorded, candidate.copies[0])
        if after < _LOW_PRECISION_RATIO * before:
            note = "the rounding of this trainer is repeated approximately, not bit by bit"
            return [MistakeDiagnosis(candidate.mistakes, "", before, after, note=note)]
    if any(rank.values["dropout"] for rank in evidence.record.ranks):
        note = "the random numbers of this run could not be repeated, so nothing else is excluded"
        return [MistakeDiagnosis(("dropout_on",), "", before, before, note=note)]
    return []


def _iterate_singles(evidence: Evidence) -> Iterator[GradientCandidate]:
    for hypothesis in HYPOTHESES:
        yield from hypothesis(evidence, evidence.reading)
    yield from iterate_shared_router_losses(evidence)
    yield from iterate_added_parameters(evidence)


def _iterate_wrong_readings(evidence: Evidence) -> Iterator[GradientCandidate]:
    """Yield each wrong reading under the objective and under every weighting."""
    for reading in list_readings(evidence):
        counts = evidence.count(reading)
        own = list_reading_mistakes(evidence, reading)
        weights = compute_objective_weights(evidence.objective, counts)
        yield GradientCandidate(own, (evidence.combine(reading, weights),))
        for normaliser in iterate_normalisers(counts, evidence.objective):
            if len(normaliser.mistakes) == 1:
                vector = evidence.combine(reading, normaliser.weights)
                yield GradientCandidate((*own, *normaliser.mistakes), (vector,))
        # The normaliser may be right where the tokens are wrong.
        right = compute_objective_weights(evidence.objective, evidence.count(evidence.reading))
        yield GradientCandidate(own, (evidence.combine(reading, right),))


def _iterate_common_factor(evidence: Evidence, expected: Tensor) -> Iterator[GradientCandidate]:
    """Yield the expected gradient times one factor, whatever its reason."""
    square = float(expected @ expected)
    if square and len(evidence.copies) == 1:
        factor = float(evidence.recorded @ expected) / square
        yield GradientCandidate(("all_scaled",), (factor * expected,), f"factor {factor:.6g}")


def _iterate_structures_of_weightings(evidence: Evidence) -> Iterator[GradientCandidate]:
    """Yield wrong divisions together with mistakes of some parameters."""
    counts = evidence.count(evidence.reading)
    for normaliser in iterate_normalisers(counts, evidence.objective):
        if len(normaliser.mistakes) == 1:
            vector = evidence.combine(evidence.reading, normaliser.weights)
            yield from iterate_parameter_mistakes(
                evidence, evidence.reading, vector, normaliser.mistakes
            )


def _build_diagnosis(
    evidence: Evidence, expected: Tensor, fitting: Sequence[GradientCandidate]
) -> MistakeDiagnosis:
    """Report the candidate with the fewest mistakes; others with the same effect next to it."""
    ordered = sorted(fitting, key=lambda candidate: len(candidate.mistakes))
    best = ordered[0]
    others = dict.fromkeys(c.mistakes for c in ordered if len(c.mistakes) == len(best.mistakes))
    others.pop(best.mistakes)

    def compute_residual(copies: Sequence[Tensor]) -> float:
        return max(
            evidence.compute_residual(recorded, copies[number % len(copies)])
            for number, recorded in enumerate(evidence.copies)
        )

    return MistakeDiagnosis(
        best.mistakes,
        best.subject,
        compute_residual((expected,)),
        compute_residual(best.copies),
        tuple(others),
    )


def find_max_norm(evidence: Evidence) -> float | None:
    """Return the largest gradient norm that the trainer allows, if it is recorded."""
    values = evidence.record.values
    for call in values["clip_calls"]:
        limit = float(call["max_norm"])
        return limit if limit < float("inf") else None
    return values.get("reported_max_grad_norm")
