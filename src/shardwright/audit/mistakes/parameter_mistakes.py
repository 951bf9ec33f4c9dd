"""Mistakes of some parameters only, where the others are right.

Shapes: P numbers of all compared gradients, E experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardwright.audit.batch_reading import BatchReading
from shardwright.audit.evidence import Evidence
from shardwright.audit.mistakes.candidates import (
    GradientCandidate,
    classify_parameter,
    describe_subset,
    find_wrong,
)
from shardwright.audit.mistakes.mistake_table import MISTAKES
from shardwright.audit.mistakes.weightings import compute_objective_weights, iterate_omissions


def iterate_parameter_mistakes(
    evidence: Evidence, reading: BatchReading, base: Tensor, mistakes: tuple[str, ...]
) -> Iterator[GradientCandidate]:
    """Yield mistakes of some parameters only, where the others equal `base`."""
    wrong = find_wrong(evidence, (base,))
    names = evidence.model.names
    if not wrong or len(wrong) == len(names) > 1:
        return
    subject = describe_subset(wrong, names)
    slices = [evidence.model.slices[name] for name in wrong]
    if len(evidence.copies) > 1:
        total = torch.stack(evidence.copies).sum(0)
        for scale in (1.0, 1.0 / len(evidence.copies)):
            if set(wrong) & set(evidence.list_wrong(scale * total, base)):
                continue
            # A rank's own gradient is what is missing to the sum over all ranks.
            copies = [base.clone() for _ in evidence.copies]
            for copy, recorded in zip(copies, evidence.copies, strict=True):
                for part in slices:
                    copy[part] += recorded[part] - scale * total[part]
            yield GradientCandidate((*mistakes, "some_not_reduced"), tuple(copies), subject)
        return
    recorded = evidence.recorded
    if not any(bool(recorded[part].any()) for part in slices):
        vector = base.clone()
        for part in slices:
            vector[part] = 0.0
        yield GradientCandidate((*mistakes, "some_lost"), (vector,), subject)
    yield from _iterate_tied(evidence, reading, base, mistakes, wrong)
    yield from _iterate_mixed_experts(evidence, base, mistakes, wrong)
    yield from _iterate_exchanged(evidence, base, mistakes, wrong)
    yield from _iterate_incomplete(evidence, reading, base, mistakes, wrong)
    yield from _iterate_aliases(evidence, base, mistakes, wrong)
    yield from _iterate_rescaled_stages(evidence, base, mistakes, wrong)
    scales = [float(recorded[p] @ base[p] / (base[p] @ base[p])) for p in slices if base[p].any()]
    if scales and max(scales) - min(scales) <= 1e-3 * abs(scales[0]):
        vector = base.clone()
        for part in slices:
            vector[part] *= scales[0]
        described = f"{subject}: factor {scales[0]:.6g}"
        yield GradientCandidate((*mistakes, "some_scaled"), (vector,), described)


def _iterate_tied(
    evidence: Evidence,
    reading: BatchReading,
    base: Tensor,
    mistakes: tuple[str, ...],
    wrong: Sequence[str],
) -> Iterator[GradientCandidate]:
    """Yield gradients of a tied embedding that has lost or doubled one of its two parts."""
    if len(wrong) != 1 or mistakes:
        return
    weights = compute_objective_weights(evidence.objective, evidence.count(reading))
    parts = [torch.zeros(()), torch.zeros(())]
    for rank, batches in enumerate(evidence.data):
        for index, batch in enumerate(batches):
            tied = evidence.model.compute_tied_gradients(batch, reading)
            if tied is None or tied.name != wrong[0]:
                return
            weight = float(weights[rank, index])
            parts[0] = parts[0] + weight * tied.owner_gradient
            parts[1] = parts[1] + weight * tied.other_gradient
    for name, first, second in (
        ("tied_counted_once", 1.0, 0.0),
        ("tied_counted_once", 0.0, 1.0),
        ("tied_counted_twice", 2.0, 1.0),
        ("tied_counted_twice", 1.0, 2.0),
        ("tied_counted_twice", 2.0, 2.0),
    ):
        vector = base.clone()
        vector[evidence.model.slices[wrong[0]]] = first * parts[0] + second * parts[1]
        yield GradientCandidate((name,), (vector,), wrong[0])


def _iterate_mixed_experts(
    evidence: Evidence, base: Tensor, mistakes: tuple[str, ...], wrong: Sequence[str]
) -> Iterator[GradientCandidate]:
    """Yield gradients of experts summed over ranks as if all ranks had the same experts.

    Expert e of every rank then gets the sum over the ranks' experts with its local number.
    """
    is_whole = evidence.model.num_projections is None
    if not is_whole or any(classify_parameter(name) != "experts" for name in wrong):
        return
    groups = _group_experts(evidence, wrong)
    num_experts = {len(rows) for rows in groups}
    if len(num_experts) != 1:
        return
    count = num_experts.pop()
    subject = describe_subset(wrong, evidence.model.names)
    for degree in range(2, min(count, len(evidence.record.ranks)) + 1):
        if count % degree:
            continue
        for scale in (1.0, 1.0 / degree):
            vector = base.clone()
            for rows in groups:
                stack = torch.stack([base[row] for row in rows])
                by_rank = stack.view(degree, count // degree, -1)
                mixed = scale * by_rank.sum(0).repeat(degree, 1)
                for row, value in zip(rows, mixed, strict=True):
                    vector[row] = value
            yield GradientCandidate((*mistakes, "experts_mixed"), (vector,), subject)


def _group_experts(evidence: Evidence, names: Sequence[str]) -> list[list[slice]]:
    """List the elements of every expert in a vector [P], for each matrix of a layer."""
    groups: list[list[slice]] = []
    single: dict[str, dict[int, slice]] = {}
    for name in names:
        part = evidence.model.slices[name]
        match = re.search(r"experts\.(\d+)\.", name)
        if match:
            single.setdefault(re.sub(r"experts\.\d+\.", "", name), {})[int(match[1])] = part
            continue
        count = evidence.record.parameter_info[name]["shape"][0]
        size = (part.stop - part.start) // count
        starts = range(part.start, part.stop, size)
        groups.append([slice(start, start + size) for start in starts])
    groups += [[rows[number] for number in sorted(rows)] for rows in single.values()]
    return groups


def _iterate_exchanged(
    evidence: Evidence, base: Tensor, mistakes: tuple[str, ...], wrong: Sequence[str]
) -> Iterator[GradientCandidate]:
    """Yield gradients that belong to other parameters of the same size, as after a wrong copy."""
    if evidence.model.num_projections is not None:
        return
    vector = base.clone()
    subjects = []
    for name in wrong:
        part = evidence.model.slices[name]
        size = part.stop - part.start
        for other, source in evidence.model.slices.items():
            if other == name or source.stop - source.start != size:
                continue
            scale = float(base[source].norm())
            error = float((evidence.recorded[part] - base[source]).norm())
            if scale and error <= evidence.relative_errors[other] * scale:
                vector[part] = base[source]
                subjects.append(f"{name} has that of {other}")
                break
        else:
            return
    yield GradientCandidate((*mistakes, "gradients_exchanged"), (vector,), "; ".join(subjects[:3]))


def _iterate_incomplete(
    evidence: Evidence,
    reading: BatchReading,
    base: Tensor,
    mistakes: tuple[str, ...],
    wrong: Sequence[str],
) -> Iterator[GradientCandidate]:
    """Yield gradients of some parameters that are read before the last micro-batches are added."""
    if mistakes:
        return
    counts = evidence.count(reading)
    weights = compute_objective_weights(evidence.objective, counts)
    for omission in iterate_omissions(counts):
        if omission.mistakes:
            lacking = evidence.combine(reading, weights * omission.weights, omission.weights)
            vector = base.clone()
            for name in wrong:
                vector[evidence.model.slices[name]] = lacking[evidence.model.slices[name]]
            which = omission.subject or MISTAKES[omission.mistakes[0]].title
            subject = f"{describe_subset(wrong, evidence.model.names)}: {which}"
            yield GradientCandidate(("gradients_incomplete",), (vector,), subject)


def iterate_added_parameters(evidence: Evidence) -> Iterator[GradientCandidate]:
    """Yield gradients to which the parameters' own values are added, times a fitted factor.

    The factor is the number of ranks, or 1 if the reduction averages.
    """
    expected = evidence.compute_expected()
    wrong = find_wrong(evidence, (expected,))
    values = {name: evidence.record.join("before", name) for name in wrong}
    if evidence.model.num_projections is not None or not wrong or not all(values.values()):
        return
    added = torch.zeros_like(expected)
    for name, copies in values.items():
        added[evidence.model.slices[name]] = copies[0].flatten().to(added.dtype)
    square = float(added @ added)
    factor = float((evidence.recorded - expected) @ added) / square if square else 0.0
    subject = f"{describe_subset(wrong, evidence.model.names)}: factor {factor:.6g}"
    yield GradientCandidate(("parameters_in_gradients",), (expected + factor * added,), subject)


def _iterate_aliases(
    evidence: Evidence, base: Tensor, mistakes: tuple[str, ...], wrong: Sequence[str]
) -> Iterator[GradientCandidate]:
    """Yield the parameters' own values where gradients are expected."""
    if evidence.model.num_projections is not None:
        return
    vector = base.clone()
    for name in wrong:
        values = evidence.record.join("before", name)
        if not values:
            return
        vector[evidence.model.slices[name]] = values[0].flatten().to(vector.dtype)
    subject = describe_subset(wrong, evidence.model.names)
    yield GradientCandidate((*mistakes, "gradients_are_parameters"), (vector,), subject)


def _iterate_rescaled_stages(
    evidence: Evidence, base: Tensor, mistakes: tuple[str, ...], wrong: Sequence[str]
) -> Iterator[GradientCandidate]:
    """Yield gradients that every pipeline stage divides by the number of micro-batches again.

    Stages after a parameter's own count, so the exponent falls from the embedding to the head.
    """
    num_batches = max(map(len, evidence.data))
    if num_batches == 1 or not any(evidence.find_layer(name) is not None for name in wrong):
        return
    exponents: dict[int, int] = {}
    vector = base.clone()
    for name in evidence.model.names:
        part = evidence.model.slices[name]
        square = float(base[part] @ base[part])
        factor = float(evidence.recorded[part] @ base[part]) / square if square else 0.0
        layer = evidence.find_layer(name)
        if not 0.0 < factor < math.inf or (layer is None and name not in wrong):
            continue
        exponent = round(-math.log(factor) / math.log(num_batches))
        if exponents.setdefault(-1 if layer is None else layer, exponent) != exponent:
            return
        vector[part] *= float(num_batches) ** -exponent
    by_depth = [exponents[layer] for layer in sorted(exponents)]
    if by_depth == sorted(by_depth, reverse=True) and by_depth[-1] >= 0:
        num_stages = len(set(by_depth))
        subject = f"{num_stages} stages, {num_batches} micro-batches"
        yield GradientCandidate((*mistakes, "stages_rescaled"), (vector,), subject)
