"""Comparison of gradients, weights and numbers with the reference, with its tolerances."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from shardwright.layout import Layout
from shardwright.numerics import get_local_tensor
from shardwright.parallel import ParallelModel
from shardwright.parallel.gradient_reduction import narrow_to_box

TOLERANCES = {"float32": 1e-5, "float64": 1e-10}
NEARLY_ZERO_SHARE = 1e-8
"""Share of the global norm; a smaller reference is compared absolutely, with that as limit."""


@dataclass(frozen=True)
class ComparisonResult:
    """Worst comparison of one quantity on this rank.

    `error` is relative unless `subject` says absolute; nan fails.
    """

    quantity: str
    subject: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """True if the error is at most `allowed`; False for nan."""
        return self.error <= self.allowed

    @property
    def severity(self) -> float:
        """Error divided by the allowed error, by which the worst is chosen; inf for nan."""
        if math.isnan(self.error):
            return math.inf
        if self.allowed == 0.0:
            return math.inf if self.error else 0.0
        return self.error / self.allowed


def get_rank(layout: Layout) -> int:
    """Return this process's rank; 0 for a layout of one rank."""
    return dist.get_rank() if layout.world_size > 1 else 0


def compare_gradients(
    model: ParallelModel, reference: dict[str, Tensor], step: int, allowed: float
) -> ComparisonResult:
    """Compare the gradients of one step, gathered and in local parts."""
    expected = _select_prefix(reference, f"gradient.{step}.")
    scale = float(reference["norm"][step])
    pairs = ((name, model.gather_gradient(name), expected.get(name)) for name in model.layouts)
    finding = _compare_tensors("gradient", pairs, expected, scale, allowed)
    local_gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return _choose_worse(
        finding, _compare_local("gradient", model, local_gradients, expected, scale, allowed)
    )


def _select_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def compare_weights(
    quantity: str, model: ParallelModel, reference: dict[str, Tensor], prefix: str, allowed: float
) -> ComparisonResult:
    """Compare the weights, gathered and in local parts, with the tensors `prefix.NAME`."""
    expected = _select_prefix(reference, f"{prefix}.")
    scale = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in expected.values()))
    pairs = ((name, model.gather_parameter(name), expected.get(name)) for name in model.layouts)
    finding = _compare_tensors(quantity, pairs, expected, scale, allowed)
    local_weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return _choose_worse(
        finding, _compare_local(quantity, model, local_weights, expected, scale, allowed)
    )


def _compare_local(
    quantity: str,
    model: ParallelModel,
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    scale: float,
    allowed: float,
) -> ComparisonResult:
    """Compare this rank's local parts; full tensors are gathered from one replica only."""
    worst = ComparisonResult(quantity, "every parameter", 0.0, allowed)
    for name, tensor in tensors.items():
        want = expected.get(name)
        local = get_local_tensor(tensor).double()
        if want is None:
            continue  # the comparison of full tensors reports it
        boxes = model.local_boxes(name)
        squares = [
            (
                narrow_to_box(local, box.local_bounds)
                - narrow_to_box(want, box.global_bounds).double()
            )
            .square()
            .sum()
            for box in boxes
        ]
        distance = math.sqrt(float(sum(squares)))
        norm = float(want.double().norm())
        subject = f"{name}, copy of rank {get_rank(model.layout)}"
        if norm <= NEARLY_ZERO_SHARE * scale:
            finding = ComparisonResult(
                quantity, f"{subject} (absolute)", distance, NEARLY_ZERO_SHARE * scale
            )
        else:
            finding = ComparisonResult(quantity, subject, distance / norm, allowed)
        worst = _choose_worse(worst, finding)
    return worst


def _choose_worse(first: ComparisonResult, second: ComparisonResult) -> ComparisonResult:
    """Choose the finding with the larger share of its allowed error."""
    return max(first, second, key=lambda finding: finding.severity)


def _compare_tensors(
    quantity: str,
    pairs: Iterable[tuple[str, Tensor | None, Tensor | None]],
    expected: dict[str, Tensor],
    scale: float,
    allowed: float,
) -> ComparisonResult:
    """Choose the parameter with the largest share of its allowed error, not an average."""
    worst = ComparisonResult(quantity, "every parameter", 0.0, allowed)
    seen = set()
    for name, got, want in pairs:
        seen.add(name)
        worst = _choose_worse(worst, compare_tensor(quantity, name, got, want, scale, allowed))
    missing = sorted(set(expected) - seen)
    return (
        ComparisonResult(quantity, f"{missing[0]}: absent", math.inf, allowed) if missing else worst
    )


def compare_tensor(
    quantity: str,
    name: str,
    actual: Tensor | None,
    expected: Tensor | None,
    scale: float,
    allowed: float,
) -> ComparisonResult:
    """Compare one tensor; a nearly zero reference is compared absolutely."""
    if actual is None and expected is None:
        return ComparisonResult(quantity, name, 0.0, allowed)
    if actual is None or expected is None or actual.shape != expected.shape:
        problem = (
            "missing" if actual is None else "unexpected" if expected is None else "wrong shape"
        )
        return ComparisonResult(quantity, f"{name}: {problem}", math.inf, allowed)
    norm = float(expected.double().norm())
    distance = float((actual.double() - expected.double()).norm())
    if norm <= NEARLY_ZERO_SHARE * scale:
        return ComparisonResult(quantity, f"{name} (absolute)", distance, NEARLY_ZERO_SHARE * scale)
    return ComparisonResult(quantity, name, distance / norm, allowed)


def compare_numbers(
    quantity: str, actual: list[float], expected: Tensor, allowed: float
) -> ComparisonResult:
    """Compare one number per step; the result is the step with the largest relative error."""
    errors = [abs(a - b) / abs(b) for a, b in zip(actual, expected.tolist(), strict=True)]
    step = max(range(len(errors)), key=lambda index: (math.isnan(errors[index]), errors[index]))
    return ComparisonResult(quantity, f"step {step}", errors[step], allowed)


def find_worst(findings: Sequence[ComparisonResult]) -> ComparisonResult:
    """Find the finding with the largest share of its allowed error."""
    return max(findings, key=lambda finding: finding.severity)
