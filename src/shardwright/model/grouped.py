"""Products of rows with the matrix of their expert: all experts in one call where PyTorch has it.

Legend: E experts, M rows sorted by expert, D in, F out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNED_BYTES = 16


def grouped_product(x_MD: Tensor, weight_EDF: Tensor, counts_E: Tensor) -> Tensor:
    """Each row times its expert's matrix, `[M, F]`; the first counts[0] rows are expert 0's, and so on to the last row.

    The counts must add up to M: `F.grouped_mm` leaves rows past the last group undefined, and their gradients too. It takes no
    float64 and wants rows that begin at multiples of 16 bytes; there a loop over the experts stands in, which waits for the
    counts on the host.
    """
    if _has_grouped(x_MD, weight_EDF):
        return F.grouped_mm(x_MD, weight_EDF, offs=counts_E.cumsum(0).to(torch.int32))
    # One view per expert by `unbind`, whose backward stacks once; indexing would make a whole gradient per expert.
    parts = zip(x_MD.split(counts_E.tolist()), weight_EDF.unbind(0), strict=True)
    return torch.cat([rows @ matrix for rows, matrix in parts])


def _has_grouped(x_MD: Tensor, weight_EDF: Tensor) -> bool:
    size = x_MD.element_size()
    return x_MD.dtype in _GROUPED_DTYPES and all(width * size % _ALIGNED_BYTES == 0 for width in weight_EDF.shape[1:])


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
