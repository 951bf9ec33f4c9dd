"""Places of rows in a buffer that has the same number of rows for every rank.

The buffer of an exchange whose sizes do not depend on the choices of experts: C rows for each
rank, of which the first are rows of tokens, sorted by expert, and the others are padding. Nothing
here makes the host wait for the device.

Legend: N tokens, K experts per token, M = N x K choices, E experts, P ranks, e = E / P experts of
one rank, C rows for each rank, X = P x C, D width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class RowPlaces(NamedTuple):
    """Places of the rows of all choices."""

    choices_X: Tensor
    """Index of the choice at each place; M for padding."""
    places_M: Tensor
    """Place of each choice's row; X for a dropped choice, and for one beyond the limit C."""
    counts_Pe: Tensor
    """Rows of each expert, by rank, and in a last column the padding: each row sums to C."""
    num_beyond_limit: Tensor
    """Number of choices beyond the limit."""


def place_rows(
    experts_NK: Tensor, counts_E: Tensor, num_ranks: int, rows_per_rank: int
) -> RowPlaces:
    """Place the rows of choices in the order of their experts, and within an expert of the tokens.

    A choice of expert E is a dropped one. `counts_E` are the numbers of the others.
    """
    experts_M = experts_NK.flatten()
    num_choices = experts_M.shape[0]
    counts_Pe = counts_E.unflatten(0, (num_ranks, -1))
    totals_P = counts_Pe.sum(1)
    starts_P = totals_P.cumsum(0) - totals_P
    order_M = experts_M.argsort(stable=True)
    indices_M = torch.arange(num_choices, device=experts_M.device)
    positions_M = torch.empty_like(order_M).scatter_(0, order_M, indices_M)
    ranks_M = experts_M // counts_Pe.shape[1]
    is_dropped_M = ranks_M == num_ranks
    offsets_M = positions_M - starts_P[ranks_M.masked_fill(is_dropped_M, 0)]
    places_M = (ranks_M * rows_per_rank + offsets_M).masked_fill(
        is_dropped_M | (offsets_M >= rows_per_rank), num_ranks * rows_per_rank
    )
    offsets_C = torch.arange(rows_per_rank, device=experts_M.device)
    positions_PC = (starts_P[:, None] + offsets_C).clamp(max=num_choices - 1)
    choices_PC = order_M[positions_PC].masked_fill(offsets_C >= totals_P[:, None], num_choices)
    ends_Pe = counts_Pe.cumsum(1).clamp(max=rows_per_rank)
    ends_Pe = torch.cat([ends_Pe, torch.full_like(ends_Pe[:, :1], rows_per_rank)], 1)
    return RowPlaces(
        choices_PC.flatten(),
        places_M,
        ends_Pe.diff(dim=1, prepend=torch.zeros_like(ends_Pe[:, :1])),
        (totals_P - rows_per_rank).clamp(min=0).sum(),
    )


def take_rows(x_ND: Tensor, choices_X: Tensor, places_M: Tensor, copies: int) -> Tensor:
    """Take row `choice // copies` for each place, `[X, D]`, and zeros for padding.

    The gradient of a row of x is the sum over its copies, in order; what the gradient has at
    places of padding is not read. `take_rows(y_XD, places_M, choices_X, 1)` takes the rows back.
    """
    rows: Tensor = _TakeRows.apply(x_ND, choices_X, places_M, copies)
    return rows


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(x_ND: Tensor, choices_X: Tensor, places_M: Tensor, copies: int) -> Tensor:
        return _take(x_ND, choices_X, copies)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, places_M, ctx.copies = inputs
        ctx.save_for_backward(places_M)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (places_M,) = ctx.saved_tensors
        gradient_MD = _take(gradients[0], places_M, 1)
        if ctx.copies > 1:
            gradient_MD = gradient_MD.unflatten(0, (-1, ctx.copies)).sum(1)
        return gradient_MD, None, None, None


def _take(x_ND: Tensor, indices: Tensor, copies: int) -> Tensor:
    num_rows = x_ND.shape[0]
    is_absent = indices >= num_rows * copies
    rows = x_ND.index_select(0, (indices // copies).clamp(max=num_rows - 1))
    return rows.masked_fill_(is_absent[:, None], 0.0)
