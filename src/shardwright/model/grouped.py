"""Products of rows with the matrix of their expert: all experts in one call where PyTorch has it.

Legend: E experts, M rows sorted by expert, D in, F out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNED_BYTES = 16


def grouped_product(x_MD: Tensor, weight: Tensor, counts_E: Tensor, *, transposed: bool) -> Tensor:
    """Each row times its expert's matrix, `[M, F]`; the first counts[0] rows are expert 0's, and so on to the last row.

    `weight` is `[E, F, D]` where it is `transposed` for the product, else `[E, D, F]`. The counts must add up to M: `F.grouped_mm`
    leaves rows past the last group undefined, and their gradients too. It takes no float64 and wants rows that begin at multiples
    of 16 bytes; there a loop over the experts stands in, which waits for the counts on the host.

    An operation of our own around both: as one it can be kept by selective recompute, compiled (`F.grouped_mm` refuses float32 to
    the compiler, and the loop reads numbers from the device) and rehearsed on fake tensors.
    """
    out_MF: Tensor = _product(x_MD, weight, counts_E, transposed)
    return out_MF


@torch.library.custom_op("shardwright::grouped_product", mutates_args=())
def _product(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, transposed: bool) -> torch.Tensor:
    matrices_EDF = weight.transpose(1, 2) if transposed else weight
    if _has_grouped(x.dtype, weight.shape):
        return F.grouped_mm(x, matrices_EDF, offs=_offsets(counts))
    out_MF = x.new_empty(x.shape[0], matrices_EDF.shape[2])
    for rows, matrix, out in zip(*_by_expert(counts, x), matrices_EDF, *_by_expert(counts, out_MF), strict=True):
        torch.mm(rows, matrix, out=out)
    return out_MF


@torch.library.custom_op("shardwright::grouped_weight_gradient", mutates_args=())
def _weight_gradient(x: torch.Tensor, y: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """For each expert x^T y over its rows, `[E, D, F]`; zeros where it has none."""
    if _has_grouped(x.dtype, (x.shape[1], y.shape[1])):
        return F.grouped_mm(x.t(), y, offs=_offsets(counts))
    gradient_EDF = x.new_empty(counts.shape[0], x.shape[1], y.shape[1])
    for rows, sent, out in zip(*_by_expert(counts, x, y), gradient_EDF, strict=True):
        torch.mm(rows.t(), sent, out=out)
    return gradient_EDF


@_product.register_fake
def _fake_product(x: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1] if transposed else weight.shape[2])


@_weight_gradient.register_fake
def _fake_weight_gradient(x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(counts.shape[0], x.shape[1], y.shape[1])


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    x, weight, counts, ctx.transposed = inputs
    ctx.save_for_backward(x, weight, counts)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x_MD, weight, counts_E = ctx.saved_tensors
    gradient_MF = gradient.contiguous()
    x_gradient = _product(gradient_MF, weight, counts_E, not ctx.transposed) if ctx.needs_input_grad[0] else None
    weight_gradient = None
    if ctx.needs_input_grad[1]:
        pair = (gradient_MF, x_MD) if ctx.transposed else (x_MD, gradient_MF)
        weight_gradient = _weight_gradient(*pair, counts_E)
    return x_gradient, weight_gradient, None, None


_product.register_autograd(_differentiate, setup_context=_keep_for_backward)


def _has_grouped(dtype: torch.dtype, shape: Sequence[int]) -> bool:
    """Whether `F.grouped_mm` takes matrices whose last two dimensions are these."""
    return dtype in _GROUPED_DTYPES and all(width * dtype.itemsize % _ALIGNED_BYTES == 0 for width in shape[-2:])


def _offsets(counts: Tensor) -> Tensor:
    """Where each expert's rows end."""
    return counts.cumsum(0).to(torch.int32)


def _by_expert(counts: Tensor, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """The rows of each expert, for each tensor."""
    sizes = counts.tolist()
    return [tensor.split(sizes) for tensor in tensors]


def take_rows(x_ND: Tensor, slots_M: Tensor, copies: int) -> Tensor:
    """Row `slot // copies` for every slot, `[M, D]`: each row of x has `copies` slots, of which some may be left out.

    The gradient of a row is the sum over its slots in their order: where `index_select` would add in the order of arrival on
    CUDA, this gives the same bits every time.
    """
    rows: Tensor = _TakeRows.apply(x_ND, slots_M, copies)
    return rows


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(x_ND: Tensor, slots_M: Tensor, copies: int) -> Tensor:
        return x_ND.index_select(0, slots_M // copies)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        x_ND, slots_M, copies = inputs
        ctx.save_for_backward(slots_M)
        ctx.num_rows, ctx.copies = x_ND.shape[0], copies

    @staticmethod
    def backward(ctx, gradient_MD):  # type: ignore[no-untyped-def]
        (slots_M,) = ctx.saved_tensors
        return put_rows(gradient_MD, slots_M, ctx.num_rows * ctx.copies).unflatten(0, (-1, ctx.copies)).sum(1), None, None


def put_rows(y_MD: Tensor, slots_M: Tensor, num_slots: int) -> Tensor:
    """Row m in slot slots[m], zeros where no row goes, `[num_slots, D]`."""
    return y_MD.new_zeros(num_slots, y_MD.shape[1]).index_copy(0, slots_M, y_MD)
