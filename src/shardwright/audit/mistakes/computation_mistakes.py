"""Mistakes inside the computation: attention, the head and experts of ranks that share rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from shardwright.audit.evidence import Evidence
from shardwright.audit.mistakes.candidates import GradientCandidate
from shardwright.audit.mistakes.computation_faults import FAULT_MISTAKES
from shardwright.audit.mistakes.fault import ComputationFault, FaultNotApplicable
from shardwright.audit.mistakes.shared_rows import list_sharing_degrees
from shardwright.audit.mistakes.weightings import (
    compute_objective_weights,
    compute_router_weights,
    iterate_normalisers,
)

_CAPACITY_FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
"""Factors of the mean number of tokens of an expert that trainers commonly set."""


def list_faults(evidence: Evidence) -> list[ComputationFault]:
    """List the wrong computations that the recorded ranks and this model can have."""
    if evidence.model.preference is not None:
        return []
    degrees = list_sharing_degrees(evidence)
    kinds_of_head = ("logits", "head input", "copies of logits")
    faults = [ComputationFault(kind, degree) for kind in kinds_of_head for degree in degrees]
    if evidence.has_router_loss:
        # The routers' loss would be computed wrongly too.
        return faults
    for degree in degrees:
        faults += _list_attention_faults(degree)
        others = ("heads", "heads and tokens", "layer numbers")
        faults += [ComputationFault(kind, degree) for kind in others]
    if evidence.model.routers:
        kinds = [(f"capacity by {order}", 1) for order in ("position", "probability", "logit")]
        kinds += [("capacity of parts", degree) for degree in degrees]
        faults += [ComputationFault("slices of features", degree) for degree in degrees]
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
    """Yield the gradients of each wrong computation, alone and with one wrong division."""
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


def iterate_router_computations(evidence: Evidence) -> Iterator[GradientCandidate]:
    """Yield routers' auxiliary losses that count padding, and those with a fitted factor."""
    if not evidence.has_router_loss or len(evidence.copies) > 1:
        return
    counts = evidence.count(evidence.reading)
    weights = compute_objective_weights(evidence.objective, counts)
    base = evidence.combine(evidence.reading, weights, 0.0)
    batches = [batch for batches in evidence.data for batch in batches]
    is_packed = any(batch.document_ids is not None for batch in batches)
    if not is_packed and any(batch.has_padding for batch in batches):
        with contextlib.suppress(FaultNotApplicable):
            _, gradients = evidence.compute_router_pieces(counts_padding=True)
            factors = compute_router_weights(counts).to(gradients.dtype)
            vector = base + torch.einsum("rm,rmp->p", factors, gradients)
            yield GradientCandidate(("router_loss_counts_padding",), (vector,))
    added = evidence.compute_expected() - base
    square = float(added @ added)
    factor = float((evidence.recorded - base) @ added) / square if square else 0.0
    if factor > 0.0:
        vector = base + factor * added
        yield GradientCandidate(("router_loss_scaled",), (vector,), f"factor {factor:.6g}")


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
