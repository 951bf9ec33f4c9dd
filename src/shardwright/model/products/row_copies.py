"""Copies of rows and sums of copies, each the gradient of the other.

A sum adds the copies of a row in a fixed order in the accumulator of the dtype, so it has the same
bits every time; adding rows in the order of arrival does not on CUDA.

Indices are no saved tensors: they outlive a recomputation, which ends when the last saved tensor
is there. So it does not repeat what comes before a sum without weights.

Legend: N rows, M copies sorted in any way, D hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class RowCopies(NamedTuple):
    """Rows and their copies, as indices in int32."""

    source_M: Tensor
    """Index of the row of each copy."""
    order_M: Tensor
    """Copies sorted by row."""
    starts_N: Tensor
    """Number of copies of all rows before each row."""


def map_copies(source_M: Tensor, num_rows: int) -> RowCopies:
    """Describe the copies of `num_rows` rows by the row of each copy."""
    order_M = source_M.argsort(stable=True)
    rows_N = torch.arange(num_rows, dtype=source_M.dtype, device=source_M.device)
    starts_N = torch.searchsorted(source_M[order_M], rows_N, out_int32=True)
    return RowCopies(source_M.to(torch.int32), order_M.to(torch.int32), starts_N)


def copy_rows(x_ND: Tensor, copies: RowCopies) -> Tensor:
    """Copy rows, `[M, D]`. The gradient of a row is the sum of those of its copies."""
    rows_MD: Tensor = _RowCopy.apply(x_ND, *copies)
    return rows_MD


def sum_copies(y_MD: Tensor, copies: RowCopies, weights_M: Tensor | None = None) -> Tensor:
    """Sum the copies of each row, `[N, D]`, multiplied by their weights. A row without copies is
    zero.
    """
    sums_ND: Tensor = _RowSum.apply(y_MD, weights_M, *copies)
    return sums_ND


@torch.library.custom_op("shardwright::sum_copies", mutates_args=())
def _sum_copies(
    y: torch.Tensor, order: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    if not order.shape[0]:
        return y.new_zeros(starts.shape[0], y.shape[1])
    sorted_weights = None if weights is None else weights.index_select(0, order)
    return F.embedding_bag(order, y, starts, mode="sum", per_sample_weights=sorted_weights)


@_sum_copies.register_fake
def _fake_sum_copies(y: Tensor, order: Tensor, starts: Tensor, weights: Tensor | None) -> Tensor:
    return y.new_empty(starts.shape[0], y.shape[1])


class _RowCopy(torch.autograd.Function):
    @staticmethod
    def forward(x_ND: Tensor, source_M: Tensor, order_M: Tensor, starts_N: Tensor) -> Tensor:
        return x_ND.index_select(0, source_M)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.copies = RowCopies(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient_ND = _sum_copies(
            gradients[0].contiguous(), ctx.copies.order_M, ctx.copies.starts_N, None
        )
        return gradient_ND, None, None, None


class _RowSum(torch.autograd.Function):
    @staticmethod
    def forward(
        y_MD: Tensor,
        weights_M: Tensor | None,
        source_M: Tensor,
        order_M: Tensor,
        starts_N: Tensor,
    ) -> Tensor:
        sums_ND: Tensor = _sum_copies(y_MD.contiguous(), order_M, starts_N, weights_M)
        return sums_ND

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        y_MD, weights_M, *copies = inputs
        ctx.copies = RowCopies(*copies)
        if weights_M is not None:
            ctx.save_for_backward(weights_M, y_MD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Read once, and before anything is allocated: a recomputation provides them.
        saved = ctx.saved_tensors
        d_y_MD = gradients[0].index_select(0, ctx.copies.source_M)
        if not saved:
            return d_y_MD, None, None, None, None
        weights_M, y_MD = saved
        d_weights_M = (d_y_MD.unsqueeze(1) @ y_MD.unsqueeze(2)).flatten()
        return d_y_MD.mul_(weights_M.unsqueeze(1)), d_weights_M, None, None, None
