"""One global gradient norm and one clip, read off the parameters' layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from shardwright.layout.parameters import ParameterLayout

SumOver = Callable[[Tensor, tuple[str, ...]], Tensor]
"""Sums a tensor over the ranks of the named mesh axes."""


def global_norm(
    gradients: Iterable[tuple[Tensor | None, ParameterLayout]],
    sum_over: SumOver,
    *,
    stage_axes: tuple[str, ...] = (),
) -> Tensor:
    """L2 norm of the whole model's gradient: one scalar, equal on every rank, in fp64.

    Each rank passes its local shards. A parameter that is cut contributes its local squares, summed over the axes that cut it;
    copies are the same number everywhere and count once. What is cut alike is summed in one collective.

    Args:
        gradients: (local shard of the gradient, layout) of every parameter on this rank; None where there is no gradient, but
            the layout must be listed even so, because every rank of an axis has to enter the same collectives. Walked once.
        sum_over: sums a tensor over the named axes.
        stage_axes: axes whose ranks hold different parameters (pipeline stages). A parameter with a copy on several stages is
            listed on one of them only.

    The result is inf or nan when any gradient of any rank is: it is reported here, and `clip_` refuses to multiply by it.
    """
    shards: dict[tuple[str, ...], list[Tensor]] = {}
    device = None
    for gradient, layout in gradients:
        local = shards.setdefault(layout.shard_axes, [])
        if gradient is not None:
            device = gradient.device
            if gradient.numel():
                local.append(gradient)

    total = torch.zeros((), dtype=torch.float64, device=device)
    for axes in sorted(shards):  # the same order of collectives on every rank
        squares = _sum_of_squares(shards[axes], total)
        total = total + (sum_over(squares, axes) if axes else squares)
    if stage_axes:
        total = sum_over(total, stage_axes)
    return total.sqrt()


def _sum_of_squares(tensors: list[Tensor], like: Tensor) -> Tensor:
    """Sum of the squares of all elements, fp64: norms per tensor in fp32 (fp64 for fp64), in one fused pass per dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    total = torch.zeros_like(like)
    for dtype, alike in by_dtype.items():
        norms = torch._foreach_norm(alike, 2, dtype=torch.promote_types(dtype, torch.float32))
        total += torch.stack(norms).double().square().sum()
    return total


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ has it; fp64 scalar, no wait for the device.

    Only a finite norm gives a meaningful coefficient: inf would give 0, and 0 x inf is nan.
    """
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def clip_(gradients: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place so that the global norm is at most `max_norm`; `norm` must be finite.

    Args:
        gradients: local shards; walked once.
        norm: from `global_norm`.

    Raises:
        ValueError: the norm is inf or nan. The caller decides before this (every rank skips the step together).
    """
    if not bool(torch.isfinite(norm)):
        raise ValueError(f"gradients with norm {norm.item()} cannot be clipped; skip the step")
    scale_(gradients, clip_coefficient(norm, max_norm))


def scale_(gradients: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiply gradients in place by one factor, in one fused pass per dtype; exactly 1 leaves every bit as it is."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, alike in by_dtype.items():
        # The factor is rounded to no less than fp32, and the product to the gradient's dtype once.
        typed = factor.to(torch.promote_types(dtype, torch.float32)) if isinstance(factor, Tensor) else factor
        torch._foreach_mul_(alike, typed)
