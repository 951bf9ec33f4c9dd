"""Products whose results are wider than their operands: fp32 from 16 bits, for gradients of
fp32 weights.

The product sums in fp32 in any case. A kernel that writes these sums saves a rounding to 16 bits,
and the pass that converts the rounded result: 4 bytes per element in place of 2 + 2 + 4.
"""

from __future__ import annotations

import torch
from torch import Tensor


def has_wide_results(operand: Tensor) -> bool:
    """Return True if one kernel multiplies matrices like `operand` and writes fp32: CUDA's, for
    operands of 16 bits."""
    is_narrow = operand.dtype in (torch.bfloat16, torch.float16)
    return operand.is_cuda and is_narrow and torch.version.hip is None


def multiply_to(left_MK: Tensor, right_KN: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute left @ right in `dtype`, `[M, N]`; rounded to the operands' dtype first where no
    kernel writes fp32."""
    if dtype == torch.float32 and has_wide_results(left_MK):
        return torch.mm(left_MK, right_KN, out_dtype=dtype)
    return (left_MK @ right_KN).to(dtype)
