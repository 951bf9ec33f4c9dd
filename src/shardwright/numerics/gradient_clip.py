"""Global gradient norm and gradient clipping, from the parameters' layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.layout.parameter_layout import ParameterLayout
from shardwright.numerics.local_tensor import get_local_tensor


@dataclass(frozen=True)
class GradientSquares:
    """Sums of a gradient's squares, for a gradient that is elsewhere when the norm is computed."""

    row_squares: Tensor | None
    """Sum over whole rows of `_ROW_ELEMENTS`, an fp64 scalar; None if there are none."""
    norm: Tensor | None
    """L2 norm of the other elements, a scalar; None if there are none."""
    dtype: torch.dtype
    """Dtype of the gradient."""
    device: torch.device


SumOver = Callable[[Tensor, tuple[str, ...]], Tensor]
"""Sums a tensor over the ranks of the named mesh axes."""


def compute_global_norm(
    gradients: Iterable[tuple[Tensor | GradientSquares | None, ParameterLayout]],
    sum_over: SumOver,
    *,
    stage_axes: tuple[str, ...] = (),
    device: torch.device | None = None,
) -> Tensor:
    """Compute the L2 norm of the whole model's gradient: an fp64 scalar, equal on every rank.

    Each rank passes its local shards. A sharded parameter contributes its local squares, summed
    over its shard axes; replicas are equal everywhere and count once. Parameters sharded over
    the same axes share one collective.

    Args:
        gradients: (local shard of the gradient, layout) of every parameter on this rank. The
            shard is None if there is no gradient; the layout must be listed even so, because
            every rank of an axis has to enter the same collectives. `sum_gradient_squares` of a
            shard may replace it, with the same bits. Iterated once.
        sum_over: sums a tensor over the named axes.
        stage_axes: axes whose ranks hold different parameters (pipeline stages). A parameter
            with a copy on several stages is listed on one of them only.
        device: device of the sum on a rank without any gradient; default that of the gradients.

    The result is inf or nan on every rank whose sums include a non-finite shard;
    `synchronise_norm` spreads it to the others. Such a step is skipped, never scaled. (An element
    above 1e19 overflows when squared in fp32 and counts as inf.)
    """
    shards: dict[tuple[str, ...], list[Tensor | GradientSquares]] = {}
    for gradient, layout in gradients:
        local = shards.setdefault(layout.shard_axes, [])
        if gradient is not None:
            device = device or gradient.device
            local.append(gradient)

    total = torch.zeros((), dtype=torch.float64, device=device)
    for axes in sorted(shards):  # the same order of collectives on every rank
        squares = _sum_squares(shards[axes], total)
        total = total + (sum_over(squares, axes) if axes else squares)
    if stage_axes:
        total = sum_over(total, stage_axes)
    return total.sqrt()


def synchronise_norm(norm: Tensor, sum_over_all: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `norm` (a scalar), or inf or nan if it is so on any rank.

    Every rank then takes the same decision about the step. Ranks count a replica from their own
    memory: if one became non-finite after its reduction (a flaky device), that rank alone would
    see it, skip the step and diverge from its replicas.

    Args:
        sum_over_all: sums a scalar in place over every rank of the run.
    """
    # A sum propagates nan and inf; a maximum may not.
    non_finite = sum_over_all(torch.where(norm.isfinite(), 0.0, norm))
    return torch.where(non_finite == 0.0, norm, non_finite)


_ROW_ELEMENTS = 4096
"""Elements that a CPU sums in fp32 at a time.

It adds them one after another: 50 million at once lose 0.4 percent of the norm, and the loss
would depend on the sharding; in rows of 4096, added in fp64, the error is 5e-9 at the same
speed.
"""


def sum_gradient_squares(gradient: Tensor) -> GradientSquares:
    """Sum a gradient's squares for a later `compute_global_norm`."""
    rows, rest = _split_rows(gradient)
    norm = None
    if rest.numel():
        (norm,) = torch._foreach_norm([rest], 2, dtype=_choose_sum_dtype(rest))
    return GradientSquares(
        None if rows is None else _sum_row_squares(rows), norm, gradient.dtype, gradient.device
    )


def _split_rows(tensor: Tensor) -> tuple[Tensor | None, Tensor]:
    """Split a tensor into whole rows `[N, _ROW_ELEMENTS]` and its other elements.

    Without rows on CUDA, which adds in a tree: that is as exact.
    """
    if tensor.device.type != "cpu" or tensor.numel() <= _ROW_ELEMENTS:
        return None, tensor
    flat = tensor.reshape(-1)
    num_full = flat.numel() // _ROW_ELEMENTS * _ROW_ELEMENTS
    return flat[:num_full].view(-1, _ROW_ELEMENTS), flat[num_full:]


def _sum_row_squares(rows: Tensor) -> Tensor:
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=_choose_sum_dtype(rows))
    return norms.double().square().sum()


def _sum_squares(tensors: Sequence[Tensor | GradientSquares], like: Tensor) -> Tensor:
    """Sum the squares of all elements as an fp64 scalar.

    One fused pass per dtype; partial sums are fp32 (fp64 for fp64 tensors).
    """
    total = torch.zeros_like(like)
    by_dtype: dict[torch.dtype, list[Tensor | GradientSquares]] = {}
    for tensor in tensors:
        if isinstance(tensor, GradientSquares):
            if tensor.row_squares is not None:
                total += tensor.row_squares
            if tensor.norm is not None:
                by_dtype.setdefault(tensor.dtype, []).append(tensor)
            continue
        rows, rest = _split_rows(tensor)
        if rows is not None:
            total += _sum_row_squares(rows)
        if rest.numel():
            by_dtype.setdefault(tensor.dtype, []).append(rest)
    for dtype, same_dtype in by_dtype.items():
        norms = torch.stack(_compute_norms(same_dtype, dtype))
        total += norms.double().square().sum()
    return total


def _compute_norms(tensors: Sequence[Tensor | GradientSquares], dtype: torch.dtype) -> list[Tensor]:
    """Compute the L2 norm of each tensor in one fused pass; those that are known are kept."""
    remaining = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    sum_dtype = torch.promote_types(dtype, torch.float32)
    computed = iter(torch._foreach_norm(remaining, 2, dtype=sum_dtype) if remaining else ())
    return [
        tensor.norm
        if isinstance(tensor, GradientSquares) and tensor.norm is not None
        else next(computed)
        for tensor in tensors
    ]


def _choose_sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def compute_clip_coefficient(norm: float, max_norm: float) -> float:
    """Compute min(1, max_norm / (norm + 1e-6)) as torch.nn.utils.clip_grad_norm_ does.

    The division is a product with the reciprocal, as torch divides a number by a tensor. Only a
    finite norm gives a meaningful coefficient: inf would give 0, and 0 x inf is nan.
    """
    return min(1.0, max_norm * (1.0 / (norm + 1e-6)))


def compute_clip_coefficient_on_device(norm: Tensor, max_norm: float) -> Tensor:
    """Compute the bits of `compute_clip_coefficient` from an fp64 norm, on its device."""
    return (max_norm * (norm + 1e-6).reciprocal()).clamp(max=1.0)


def scale_(gradients: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiply gradients in place by one factor, in one fused pass per dtype.

    A factor of exactly 1 changes no bit.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for each in gradients:
        # One operation on several tensors takes no DTensors of different meshes.
        gradient = get_local_tensor(each)
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for same_dtype in by_dtype.values():
        # The factor is rounded to fp32 or wider, and the product once, to the gradient's dtype.
        # torch on a CPU would round a number that is no tensor to 16 bits first.
        rounded = factor
        if isinstance(factor, Tensor) or same_dtype[0].is_cpu:
            rounded = torch.as_tensor(factor, dtype=_choose_sum_dtype(same_dtype[0]))
        torch._foreach_mul_(same_dtype, rounded)
