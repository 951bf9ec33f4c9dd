"""Grouped matrix products: each row times the matrix of its expert.

Legend: E experts, M rows sorted by expert, D in, F out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROW_ALIGNMENT_BYTES = 16
_NUM_ONES = 8
"""Columns of ones that sum rows: so many are aligned in 16 and 32 bits."""


def multiply_grouped(x_MD: Tensor, weight: Tensor, counts_E: Tensor, *, transposed: bool) -> Tensor:
    """Multiply each row by its expert's matrix, `[M, F]`; rows are sorted by expert.

    The first counts[0] rows belong to expert 0. `weight` is `[E, F, D]` if `transposed`, else
    `[E, D, F]`. Rows after those of the last expert are not read: their results, and the
    gradients of their inputs, are undefined. `F.grouped_mm` requires rows that start at multiples
    of 16 bytes, so other widths (the rank of a small adapter) are padded with zeros. It does not
    support float64, for which a loop over the experts runs, which synchronises with the host for
    the counts.

    A custom operator contains both. It can be saved by selective recompute, compiled
    (`F.grouped_mm` does not compile for float32, and the loop reads numbers from the device)
    and rehearsed on fake tensors.
    """
    out_MF: Tensor = _multiply(x_MD, weight, counts_E, transposed)
    return out_MF


def compute_grouped_weight_gradient(x_MD: Tensor, y_MF: Tensor, counts_E: Tensor) -> Tensor:
    """Compute x^T y over each expert's rows, `[E, D, F]`; zeros for an expert without rows."""
    gradient_EDF: Tensor = _weight_gradient(x_MD, y_MF, counts_E)
    return gradient_EDF


def repeat_by_expert(bias_EF: Tensor, counts_E: Tensor, num_rows: int) -> Tensor:
    """Repeat each expert's vector for its rows, `[M, F]`.

    If `counts_E` has one more entry, so many rows of zeros follow. Their gradients are not read.
    The gradient of a vector is a product with ones, so it is summed in fp32 and rounded once, in
    an order of its own. That of `index_select` on CUDA is rounded to 16 bits at each of its
    atomic additions, in any order.
    """
    rows: Tensor = _RowRepetition.apply(bias_EF, counts_E, num_rows)
    return rows


class _RowRepetition(torch.autograd.Function):
    @staticmethod
    def forward(bias_EF: Tensor, counts_E: Tensor, num_rows: int) -> Tensor:
        num_padded = counts_E.shape[0] - bias_EF.shape[0]
        if num_padded:
            bias_EF = F.pad(bias_EF, (0, 0, 0, num_padded))
        return bias_EF.repeat_interleave(counts_E, dim=0, output_size=num_rows)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        bias_EF, counts_E, _ = inputs
        ctx.save_for_backward(counts_E)
        ctx.num_experts = bias_EF.shape[0]

    @staticmethod
    def backward(ctx, gradient_MF):  # type: ignore[no-untyped-def]
        (counts_E,) = ctx.saved_tensors
        gradient_MF = gradient_MF.contiguous()
        ones = gradient_MF.new_ones(gradient_MF.shape[0], _NUM_ONES)
        sums = compute_grouped_weight_gradient(ones, gradient_MF, counts_E[: ctx.num_experts])
        return sums[:, 0], None, None


@torch.library.custom_op("shardwright::grouped_product", mutates_args=())
def _multiply(
    x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, transposed: bool
) -> torch.Tensor:
    matrices_EDF = weight.transpose(1, 2) if transposed else weight
    if x.dtype in _GROUPED_DTYPES:
        padded_EDF = _pad_widths(weight, 2)
        padded_EDF = padded_EDF.transpose(1, 2) if transposed else padded_EDF
        padded_MF = F.grouped_mm(_pad_widths(x, 1), padded_EDF, offs=_compute_offsets(counts))
        return padded_MF[:, : matrices_EDF.shape[2]].contiguous()
    out_MF = x.new_empty(x.shape[0], matrices_EDF.shape[2])
    for rows, matrix, out in zip(
        *_split_by_expert(counts, x), matrices_EDF, *_split_by_expert(counts, out_MF), strict=True
    ):
        torch.mm(rows, matrix, out=out)
    return out_MF


@torch.library.custom_op("shardwright::grouped_weight_gradient", mutates_args=())
def _weight_gradient(x: torch.Tensor, y: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Operator of `compute_grouped_weight_gradient`."""
    if x.dtype in _GROUPED_DTYPES:
        padded = F.grouped_mm(
            _pad_widths(x, 1).t(), _pad_widths(y, 1), offs=_compute_offsets(counts)
        )
        return padded[:, : x.shape[1], : y.shape[1]].contiguous()
    gradient_EDF = x.new_empty(counts.shape[0], x.shape[1], y.shape[1])
    for x_rows, y_rows, out in zip(*_split_by_expert(counts, x, y), gradient_EDF, strict=True):
        torch.mm(x_rows.t(), y_rows, out=out)
    return gradient_EDF


@_multiply.register_fake
def _fake_multiply(x: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1] if transposed else weight.shape[2])


@_weight_gradient.register_fake
def _fake_weight_gradient(x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(counts.shape[0], x.shape[1], y.shape[1])


def _save_for_backward(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor
) -> None:
    x, weight, counts, ctx.is_transposed = inputs
    # Only the weight's gradient needs x.
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, counts)


def _compute_gradients(
    ctx: Any, gradient: Tensor
) -> tuple[Tensor | None, Tensor | None, None, None]:
    x_MD, weight, counts_E = ctx.saved_tensors
    gradient_MF = gradient.contiguous()
    x_gradient = (
        _multiply(gradient_MF, weight, counts_E, not ctx.is_transposed)
        if ctx.needs_input_grad[0]
        else None
    )
    weight_gradient = None
    if ctx.needs_input_grad[1]:
        pair = (gradient_MF, x_MD) if ctx.is_transposed else (x_MD, gradient_MF)
        weight_gradient = _weight_gradient(*pair, counts_E)
    return x_gradient, weight_gradient, None, None


_multiply.register_autograd(_compute_gradients, setup_context=_save_for_backward)


def _pad_widths(tensor: Tensor, num_dims: int) -> Tensor:
    """Pad the last dims with zeros to multiples of 16 bytes."""
    multiple = _ROW_ALIGNMENT_BYTES // tensor.dtype.itemsize
    missing = [-width % multiple for width in reversed(tensor.shape[-num_dims:])]
    if not any(missing):
        return tensor
    return F.pad(tensor, [end for width in missing for end in (0, width)])


def _compute_offsets(counts: Tensor) -> Tensor:
    """Compute the end of each expert's rows."""
    return counts.cumsum(0).to(torch.int32)


def _split_by_expert(counts: Tensor, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Split each tensor into the rows of each expert, without those after the last one."""
    sizes = counts.tolist()
    return [tensor[: sum(sizes)].split(sizes) for tensor in tensors]


def take_first(slots_M: Tensor, num_slots: Tensor) -> Tensor:
    """Return the first `num_slots` slots; the host reads the number, and waits for its device.

    In compiled code an operator reads it, and its result has a size that is a symbol.
    """
    if torch.compiler.is_compiling():
        first: Tensor = _take_first(slots_M, num_slots)
        return first
    return slots_M[: int(num_slots)]


@torch.library.custom_op("shardwright::take_first", mutates_args=())
def _take_first(slots: torch.Tensor, num_slots: torch.Tensor) -> torch.Tensor:
    return slots[: int(num_slots)].clone()


@_take_first.register_fake
def _fake_take_first(slots: Tensor, num_slots: Tensor) -> Tensor:
    return slots.new_empty(torch.library.get_ctx().new_dynamic_size())


def gather_rows(x_ND: Tensor, slots_M: Tensor, copies: int, *, has_gaps: bool = True) -> Tensor:
    """Gather row `slot // copies` for every slot, `[M, D]`.

    Each row of x has `copies` slots; some may be missing if there are gaps. The gradient of a row
    is the sum over its slots in order, so it is deterministic; that of `index_select` is not on
    CUDA.
    """
    rows: Tensor = _RowGather.apply(x_ND, slots_M, copies, has_gaps)
    return rows


class _RowGather(torch.autograd.Function):
    @staticmethod
    def forward(x_ND: Tensor, slots_M: Tensor, copies: int, has_gaps: bool) -> Tensor:
        return x_ND.index_select(0, slots_M // copies)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        x_ND, slots_M, copies, has_gaps = inputs
        ctx.save_for_backward(slots_M)
        ctx.num_rows = x_ND.shape[0]
        ctx.copies = copies
        ctx.has_gaps = has_gaps

    @staticmethod
    def backward(ctx, gradient_MD):  # type: ignore[no-untyped-def]
        (slots_M,) = ctx.saved_tensors
        num_slots = ctx.num_rows * ctx.copies
        rows = scatter_rows(gradient_MD, slots_M, num_slots, has_gaps=ctx.has_gaps)
        return rows.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


def scatter_rows(y_MD: Tensor, slots_M: Tensor, num_slots: int, *, has_gaps: bool = True) -> Tensor:
    """Scatter row m to slot slots[m], `[num_slots, D]`; other slots are zero.

    Without gaps every slot has a row, and the rows are gathered in the order of the slots: one read
    and one write instead of zeros as well. Only the slots are saved; `index_copy` saves the rows.
    """
    rows: Tensor = _RowScatter.apply(y_MD, slots_M, num_slots, has_gaps)
    return rows


class _RowScatter(torch.autograd.Function):
    @staticmethod
    def forward(y_MD: Tensor, slots_M: Tensor, num_slots: int, has_gaps: bool) -> Tensor:
        if has_gaps:
            return y_MD.new_zeros(num_slots, y_MD.shape[1]).index_copy_(0, slots_M, y_MD)
        indices_M = torch.arange(slots_M.shape[0], dtype=slots_M.dtype, device=slots_M.device)
        return y_MD.index_select(0, torch.empty_like(slots_M).scatter_(0, slots_M, indices_M))

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, gradient_SD):  # type: ignore[no-untyped-def]
        (slots_M,) = ctx.saved_tensors
        return gradient_SD.index_select(0, slots_M), None, None, None
