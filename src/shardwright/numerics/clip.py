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
    device: torch.device | None = None,
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
        device: where to sum on a rank that has no gradient at all; default that of the gradients.

    The result is inf or nan on every rank that a shard which is reaches; `agree_on_norm` tells the others. Such a step is
    skipped, never multiplied by. (An element above 1e19 overflows when squared in fp32 and counts as inf.)
    """
    shards: dict[tuple[str, ...], list[Tensor]] = {}
    for gradient, layout in gradients:
        local = shards.setdefault(layout.shard_axes, [])
        if gradient is not None:
            device = device or gradient.device
            local.append(gradient)

    total = torch.zeros((), dtype=torch.float64, device=device)
    for axes in sorted(shards):  # the same order of collectives on every rank
        squares = _sum_of_squares(shards[axes], total)
        total = total + (sum_over(squares, axes) if axes else squares)
    if stage_axes:
        total = sum_over(total, stage_axes)
    return total.sqrt()


def agree_on_norm(norm: Tensor, sum_over_all: Callable[[Tensor], Tensor]) -> Tensor:
    """`norm` (a scalar), or inf or nan where it is so on any rank: every rank then comes to the same decision about the step.

    A copy that several ranks hold is counted by each from its own memory. Should one go bad after its sum (a flaky device), that
    rank alone would see it, skip alone, and part from its replicas.

    Args:
        sum_over_all: sums a scalar in place over every rank of the run.
    """
    bad = sum_over_all(torch.where(norm.isfinite(), 0.0, norm))  # a sum keeps nan and inf; a maximum need not
    return torch.where(bad == 0.0, norm, bad)


_ROW = 4096
"""Elements that a CPU sums in fp32 in one go. It adds them up one after another: 50 million at once lose 0.4 percent of the
norm, and the loss would depend on how a parameter is cut; in rows of 4096, added up in fp64, it is 5e-9 at the same speed."""


def _sum_of_squares(tensors: list[Tensor], like: Tensor) -> Tensor:
    """Sum of the squares of all elements in fp64, as one scalar: fp32 (fp64 for fp64) inside, in one fused pass per dtype."""
    total = torch.zeros_like(like)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.numel() > _ROW:  # CUDA adds up in a tree, which is as exact as rows
            flat = tensor.reshape(-1)
            whole = flat.numel() // _ROW * _ROW
            norms = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=_sum_dtype(tensor))
            total += norms.double().square().sum()
            tensor = flat[whole:]
        if tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_dtype.values():
        norms = torch.stack(torch._foreach_norm(alike, 2, dtype=_sum_dtype(alike[0])))
        total += norms.double().square().sum()
    return total


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


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
    for alike in by_dtype.values():
        # The factor is rounded to no less than fp32, and the product to the gradient's dtype once.
        typed = factor.to(_sum_dtype(alike[0])) if isinstance(factor, Tensor) else factor
        torch._foreach_mul_(alike, typed)
