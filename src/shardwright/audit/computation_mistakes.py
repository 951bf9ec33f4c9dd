"""Mistakes inside the computation: attention, the head and experts of ranks that share rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from shardwright.audit.candidates import GradientCandidate
from shardwright.audit.computation_faults import (
    FAULT_MISTAKES,
    ComputationFault,
    FaultNotApplicable,
)
from shardwright.audit.evidence import Evidence
from shardwright.audit.shared_rows import list_sharing_degrees
from shardwright.audit.weightings import compute_objective_weights, iterate_normalisers

_CAPACITY_FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
"""Factors of the mean number of tokens of an expert that trainers commonly set."""


def list_faults(evidence: Evidence) -> list[ComputationFault]:
    """List the wrong computations that the recorded ranks and this model can have."""
    if evidence.model.preference is not None:
        return []
    degrees = list_sharing_degrees(evidence)
    faults = [ComputationFault(kind, degree) for degree in degrees for kind in ("logits",)]
    faults += [ComputationFault("head input", degree) for degree in degrees]
    if evidence.has_router_loss:
        # The routers' loss would be computed wrongly too.
        return faults
    for degree in degrees:
        faults += _list_attention_faults(degree)
        faults += [ComputationFault(kind, degree) for kind in ("heads", "heads and tokens")]
    if evidence.model.routers:
        kinds = [(f"capacity by {order}", 1) for order in ("position", "probability", "logit")]
        kinds += [("capacity of parts", degree) for degree in degrees]
        faults += [
            ComputationFault(kind, degree, capacity_factor=factor, renormalises=renormalises)
            for kind, degree in kinds
            for factor in _CAPACITY_FACTORS
            for renormalises in (False, True)
        ]
    return faults


def _list_attention_faults(degree: int) -> list[ComputationFault]:
    """List lost blocks of gradients: those of a part's own keys, and of its neighbours'.

    Parts are pieces, or pairs of mirrored ones; of the latter a piece may have its own block too.
    """
    blocks = [(offset, loses) for loses in (False, True) for offset in (0, 1, degree - 1)]
    if degree == 2:  # to lose one of two blocks is to keep the other
        blocks = [(0, False), (1, False)]
    parts = [(degree, mirrored, *block) for mirrored in (False, True) for block in blocks]
    parts += [(2 * degree, False, 0, loses) for loses in (False, True)]
    return [
        ComputationFault(kind, number, mirrored, offset, loses)
        for kind in ("keys", "queries", "keys and queries")
        for number, mirrored, offset, loses in parts
    ]


def iterate_faults(evidence: Evidence) -> Iterator[GradientCandidate]:
    """Yield the gradients of each wrong computation, alone and beside one wrong division."""
    for fault in list_faults(evidence):
        reading = replace(evidence.reading, fault=fault)
        own = FAULT_MISTAKES[fault.kind]
        try:
            counts = evidence.count(reading)
        except FaultNotApplicable:
            continue
        weights = compute_objective_weights(evidence.objective, counts)
        vector = evidence.combine(reading, weights)
        yield GradientCandidate(own, (vector,), fault.describe())
        for normaliser in iterate_normalisers(counts, evidence.objective):
            if len(own) == len(normaliser.mistakes) == 1:
                vector = evidence.combine(reading, normaliser.weights, normaliser.router_factors)
                mistakes = (*own, *normaliser.mistakes)
                yield GradientCandidate(mistakes, (vector,), fault.describe())
        evidence.forget(reading)


def iterate_smoothing(evidence: Evidence) -> Iterator[GradientCandidate]:
    """Yield gradients of smoothed labels, whose smoothing is fitted."""
    if evidence.model.preference is not None or len(evidence.copies) > 1:
        return
    right = compute_objective_weights(evidence.objective, evidence.count(evidence.reading))
    weightings: list[tuple[tuple[str, ...], Tensor]] = [((), right)]
    for normaliser in iterate_normalisers(evidence.count(evidence.reading), evidence.objective):
        if len(normaliser.mistakes) == 1:
            weightings.append((normaliser.mistakes, normaliser.weights))
    for degree in (1, *list_sharing_degrees(evidence)):
        own = "labels_smoothed" if degree == 1 else "labels_smoothed_by_parts"
        reading = replace(evidence.reading, fault=ComputationFault("smoothing", degree))
        for mistakes, weights in weightings:
            base = evidence.combine(evidence.reading, weights)
            added = evidence.combine(reading, weights, 0.0)
            square = float(added @ added)
            share = float((evidence.recorded - base) @ added) / square if square else 0.0
            if 0.0 < share < 1.0:
                subject = f"smoothing {share:.6g}" + (f", {degree} parts" if degree > 1 else "")
                yield GradientCandidate((own, *mistakes), (base + share * added,), subject)
        evidence.forget(reading)
