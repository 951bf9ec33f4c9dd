"""Mistakes of ranks that share rows: tensor, context and pipeline parallel ones.

Shapes: P numbers of all compared gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from shardwright.audit.batch_reading import BatchReading, ContextPart
from shardwright.audit.evidence import Evidence
from shardwright.audit.mistakes.candidates import GradientCandidate
from shardwright.audit.mistakes.weightings import compute_objective_weights


def list_sharing_degrees(evidence: Evidence) -> list[int]:
    """List the possible numbers of ranks of one kind that share rows, above 1."""
    sharing = len(evidence.record.ranks) // len(evidence.data)
    return [degree for degree in range(2, sharing + 1) if sharing % degree == 0]


def iterate_shared_factors(
    evidence: Evidence, reading: BatchReading
) -> Iterator[GradientCandidate]:
    """Yield gradients wrong by the number of ranks that share rows, or by tokens not counted."""
    expected = evidence.compute_expected()
    for degree in list_sharing_degrees(evidence):
        subject = f"{degree} ranks"
        yield GradientCandidate(("multiplied_by_sharing_ranks",), (degree * expected,), subject)
        yield GradientCandidate(("divided_by_sharing_ranks",), (expected / degree,), subject)
    if evidence.objective != "mean_tokens":
        return
    counts = evidence.count(reading).supervised
    total = float(counts.sum())
    omitted = {f"data rank {rank}": float(row.sum()) for rank, row in enumerate(counts)}
    omitted |= {
        f"micro-batch {batch} of data rank {rank}": float(count)
        for rank, row in enumerate(counts)
        for batch, count in enumerate(row)
    }
    for subject, count in omitted.items():
        if 0.0 < count < total:
            vector = total / (total - count) * expected
            yield GradientCandidate(("tokens_not_counted",), (vector,), subject)


def iterate_shared_router_losses(evidence: Evidence) -> Iterator[GradientCandidate]:
    """Yield routers' auxiliary losses that ranks with the same rows add more or less than once."""
    if not evidence.has_router_loss:
        return
    weights = compute_objective_weights(evidence.objective, evidence.count(evidence.reading))
    for degree in list_sharing_degrees(evidence):
        for key, factor in (
            ("router_loss_multiplied_by_sharing_ranks", float(degree)),
            ("router_loss_divided_by_sharing_ranks", 1.0 / degree),
        ):
            vector = evidence.combine(evidence.reading, weights, factor)
            yield GradientCandidate((key,), (vector,), f"{degree} ranks")


def iterate_context_means(evidence: Evidence, reading: BatchReading) -> Iterator[GradientCandidate]:
    """Yield means over context parallel ranks of each one's mean over its part of the rows.

    A part is a contiguous piece, or a piece from the beginning and its mirror image from the end.
    """
    if evidence.model.preference is not None or evidence.has_router_loss:
        return
    for degree in list_sharing_degrees(evidence):
        for is_mirrored in (False, True):
            parts = [
                replace(reading, context_part=ContextPart(number, degree, is_mirrored))
                for number in range(degree)
            ]
            for objective in ("mean_tokens", "mean_micro_batches"):
                vector = torch.zeros(evidence.model.num_values, dtype=evidence.model.dtype)
                for part in parts:
                    weights = compute_objective_weights(objective, evidence.count(part))
                    vector += torch.nan_to_num(evidence.combine(part, weights))
                subject = f"{degree} context ranks"
                mistakes = ("mean_of_context_means",)
                yield GradientCandidate(mistakes, (vector / degree,), subject)
                yield GradientCandidate((*mistakes, "context_not_divided"), (vector,), subject)
