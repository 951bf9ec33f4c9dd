"""Wrong computations of experts whose buffers have a capacity.

Shapes: N tokens of a micro-batch, E experts, K experts of a token, C capacity, D model features.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.audit.mistakes.fault import ComputationFault, FaultNotApplicable, TokenPlaces


@contextlib.contextmanager
def limit_capacity(
    routers: Sequence[nn.Module], fault: ComputationFault, places: TokenPlaces
) -> Iterator[None]:
    """Drop tokens that exceed the capacity of an expert: their weight becomes 0."""

    def limit(_router: nn.Module, _inputs: Any, output: Any) -> Any:
        if not (isinstance(output, tuple) and len(output) == 3):
            raise FaultNotApplicable
        logits, weights, experts = output
        if logits.shape[0] != places.columns.numel() or weights.shape != experts.shape:
            raise FaultNotApplicable
        fits = _choose_tokens(fault, places, logits.detach(), experts).gather(1, experts)
        weights = weights * fits
        if fault.renormalises:
            smallest = torch.finfo(weights.dtype).eps
            weights = weights / weights.sum(1, keepdim=True).clamp(min=smallest)
        return logits, weights, experts

    if not routers or places.has_padding:
        raise FaultNotApplicable
    handles = [router.register_forward_hook(limit) for router in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _choose_tokens(
    fault: ComputationFault, places: TokenPlaces, logits: Tensor, experts: Tensor
) -> Tensor:
    """Return True where an expert takes a token, [N, E].

    Args:
        fault: The order of tokens, and the capacity.
        places: Places of the N tokens.
        logits: [N, E].
        experts: Experts of each token, [N, K].
    """
    is_real = places.columns.flatten() >= 0
    is_chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
    is_chosen &= is_real[:, None]
    num_tokens = places.num_rows * places.num_columns
    mean = num_tokens * experts.shape[1] / logits.shape[1]
    capacity = max(1, int(-(-fault.capacity_factor * mean // 1)))
    if fault.kind in ("capacity by position", "capacity of parts"):
        order = (places.rows[:, None] * places.num_columns + places.columns).flatten()
        order = torch.where(is_real, order, num_tokens).argsort(stable=True)
        numbers = torch.zeros_like(logits, dtype=torch.int64)
        if fault.kind == "capacity by position":
            numbers[order] = is_chosen[order].cumsum(0) - 1
            return is_chosen & (numbers < capacity)
        parts = places.number_parts(fault.degree).flatten()
        for part in range(fault.degree):
            is_part = is_chosen & (parts == part)[:, None]
            numbers[order] = torch.where(
                is_part[order], is_part[order].cumsum(0) - 1, numbers[order]
            )
        return is_chosen & (numbers < -(-capacity // fault.degree))
    scores = logits if fault.kind == "capacity by logit" else logits.softmax(1)
    # Tokens of other experts have score 0, as where chosen scores are scattered into zeros.
    scores = torch.where(is_chosen, scores, 0.0)
    scores[~is_real] = -torch.inf
    best = scores.topk(min(capacity, int(is_real.sum())), dim=0).indices
    return is_chosen & torch.zeros_like(is_chosen).scatter(0, best, True)


@contextlib.contextmanager
def slice_features(
    module: nn.Module, fault: ComputationFault, places: TokenPlaces
) -> Iterator[None]:
    """Make experts read slices of the features as slots of their buffers, inside this context."""
    found = [part for name, part in module.named_modules() if name.endswith(".experts")]
    is_padded = places.has_padding or bool((places.columns < 0).any())
    if not found or is_padded:
        raise FaultNotApplicable
    for experts in found:
        experts.forward = partial(_compute_sliced, experts.forward, fault.degree)
    try:
        yield
    finally:
        for experts in found:
            del experts.forward


def _compute_sliced(
    compute: Any, degree: int, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor
) -> Tensor:
    """Compute experts of a buffer [E x C, D] of which each rank takes features instead of slots.

    A rank's slice [E x C, D / degree] is reshaped to [E, C / degree, D], and the outputs of the
    ranks are joined along the capacity.

    Args:
        compute: The experts of transformers.
        degree: Number of ranks.
        x_ND: Tokens.
        experts_NK: Experts of each token.
        weights_NK: Their weights.
    """
    num_experts = int(experts_NK.max()) + 1
    num_features = x_ND.shape[1]
    is_chosen = torch.zeros(len(x_ND), num_experts, dtype=torch.int64).scatter(1, experts_NK, 1)
    capacity = -(-int(is_chosen.sum(0).max()) // degree) * degree
    if num_features % degree:
        raise FaultNotApplicable
    slots_NK = experts_NK * capacity + (is_chosen.cumsum(0) - 1).gather(1, experts_NK)
    buffer = x_ND.new_zeros(num_experts * capacity, num_features).index_put(
        (slots_NK.flatten(),), x_ND.repeat_interleave(experts_NK.shape[1], 0)
    )
    slices = [part.reshape(num_experts, -1, num_features) for part in buffer.chunk(degree, 1)]
    inputs = torch.cat(slices, 1).flatten(0, 1)
    owners = torch.arange(num_experts).repeat_interleave(capacity)[:, None]
    outputs: Tensor = compute(inputs, owners, torch.ones_like(owners, dtype=inputs.dtype))
    return (weights_NK[..., None] * outputs[slots_NK]).sum(1)
