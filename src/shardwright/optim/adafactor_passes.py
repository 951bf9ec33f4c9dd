"""The two elementwise passes of Adafactor's update, as separate operations and compiled.

Both compute the same bits. Sums over rows, columns and parameters stay uncompiled: the order of
their additions, and so their last bits, would be another.

Legend: E matrices of a stack, R rows, C columns.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from shardwright.optim.exact_operations import CompileFunction, multiply_add

_SAMPLE_SHAPE = (67, 131)


def divide_by_root(
    gradient: Tensor,
    row: Tensor,
    column: Tensor,
    update: Tensor,
    compile_function: CompileFunction | None,
) -> None:
    """Write gradient / sqrt(row x column), shape `[.., R, C]`, to `update`.

    `row` `[.., R]` and `column` `[.., C]` are factors of the second moment. Matrices of one row or
    column are computed separately, as torch would compile another graph for them.
    """
    is_contiguous = gradient.is_contiguous() and update.is_contiguous()
    function = _divide_separately
    if compile_function and is_contiguous and min(update.shape[-2:]) > 1:
        dtypes = (row.dtype, gradient.dtype)
        function = compile_function(
            _describe("gradient / root", *dtypes),
            _divide,
            _divide_separately,
            partial(_make_division_sample, *dtypes),
        )
    if function is _divide_separately:
        function(gradient, row, column, update)
        return
    for matrices in zip(
        gradient.view(-1, *gradient.shape[-2:]),
        row.reshape(-1, row.shape[-1]),
        column.reshape(-1, column.shape[-1]),
        update.view(-1, *update.shape[-2:]),
        strict=True,
    ):
        function(*_mark_varying(*matrices))


def scale_and_add(
    local: Tensor,
    update: Tensor,
    factor: float,
    alpha: float,
    compile_function: CompileFunction | None,
) -> None:
    """Compute local x factor + alpha x update in place."""
    function = _scale_and_add_separately
    dtypes = (local.dtype, update.dtype)
    if compile_function and local.numel() > 1 and local.is_contiguous() and update.is_contiguous():
        function = compile_function(
            _describe("weights + update", *dtypes),
            _scale_and_add,
            _scale_and_add_separately,
            partial(_make_addition_sample, *dtypes),
        )
    if function is not _scale_and_add_separately:
        local, update = _mark_varying(local.view(-1), update.view(-1))
    function(local, update, *_build_scalars(local.dtype, factor, alpha))


def _divide_separately(gradient: Tensor, row: Tensor, column: Tensor, update: Tensor) -> None:
    estimate = row[..., None] * column[..., None, :]
    estimate.clamp_(min=torch.finfo(row.dtype).eps ** 2).rsqrt_()
    update.copy_(estimate.mul_(gradient))


def _divide(gradient_RC: Tensor, row_R: Tensor, column_C: Tensor, update_RC: Tensor) -> None:
    estimate_RC = (row_R[:, None] * column_C[None, :]).clamp(min=torch.finfo(row_R.dtype).eps ** 2)
    update_RC.copy_((estimate_RC.rsqrt() * gradient_RC).to(row_R.dtype))


def _scale_and_add_separately(local: Tensor, update: Tensor, factor: Tensor, alpha: Tensor) -> None:
    local.mul_(float(factor))
    local.add_(update, alpha=float(alpha))


def _scale_and_add(local: Tensor, update: Tensor, factor: Tensor, alpha: Tensor) -> None:
    scaled = (local.to(factor.dtype) * factor).to(local.dtype)
    update = update.to(factor.dtype)
    factors = torch.ones_like(update) * alpha  # on the device of the update
    local.copy_(multiply_add(update, factors, scaled.to(factor.dtype)))


def _mark_varying(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Mark all dims as varying between calls: all sizes share a graph."""
    for tensor in tensors:
        for dim in range(tensor.ndim):
            torch._dynamo.mark_dynamic(tensor, dim)
    return tensors


def _build_scalars(dtype: torch.dtype, *numbers: float) -> tuple[Tensor, ...]:
    """Build CPU tensors without dims, in the precision in which kernels compute."""
    wide = torch.promote_types(dtype, torch.float32)
    return tuple(torch.tensor(number, dtype=wide) for number in numbers)


def _describe(kind: str, state_dtype: torch.dtype, gradient_dtype: torch.dtype) -> str:
    text = f"Adafactor, {kind} ({state_dtype}, gradients {gradient_dtype})"
    return text.replace("torch.", "")


def _make_division_sample(
    state_dtype: torch.dtype, gradient_dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Make a matrix with factors of all sizes."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(_SAMPLE_SHAPE, generator=generator)
    row, column = (
        10.0 ** (torch.rand(size, generator=generator) * 24 - 20) for size in _SAMPLE_SHAPE
    )
    row[::9] = 0.0
    tensors = (gradient.to(gradient_dtype), row.to(state_dtype), column.to(state_dtype))
    on_device = [tensor.to(device) for tensor in tensors]
    return _mark_varying(*on_device, torch.zeros_like(on_device[0]))


def _make_addition_sample(
    state_dtype: torch.dtype, gradient_dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    """Make a vector of weights and one of updates."""
    generator = torch.Generator().manual_seed(0)
    local, update = (
        torch.randn(_SAMPLE_SHAPE, generator=generator).flatten().to(device, dtype)
        for dtype in (state_dtype, gradient_dtype)
    )
    return *_mark_varying(local, update), *_build_scalars(state_dtype, 0.997, -0.0123)
