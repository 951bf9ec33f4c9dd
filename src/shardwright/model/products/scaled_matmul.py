"""Products of quantised matrices by torch's kernels for 8-bit operands.

The kernels sum over the columns of a row-major left and the rows of a column-major right matrix.
They take one scale per tensor, or one per row of the left and per column of the right.

Legend: M rows, K summed dim, N columns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from shardwright.model.products.fp8 import QuantisedMatrix

DIM_MULTIPLE = 16
"""The kernels take a summed dim and output columns that are multiples of this."""


def multiply_on_device(left: QuantisedMatrix, right: QuantisedMatrix, dtype: torch.dtype) -> Tensor:
    """Compute left @ right, `[M, N]`, in `dtype`."""
    left_scales = 1.0 / left.multipliers
    right_scales = 1.0 / right.multipliers
    codes_MK = left.codes.contiguous()
    codes_KN = right.codes.t().contiguous().t()
    if left_scales.numel() == right_scales.numel() == 1:
        kind = ScalingType.TensorWise
        left_scales, right_scales = left_scales.view(1), right_scales.view(1)
    else:
        kind = ScalingType.RowWise
        left_scales = left_scales.expand(codes_MK.shape[0], 1).contiguous()
        right_scales = right_scales.expand(1, codes_KN.shape[1]).contiguous()
    return F.scaled_mm(
        codes_MK, codes_KN, left_scales, kind, right_scales, kind, output_dtype=dtype
    )
