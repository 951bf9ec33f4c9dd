"""Sums in fp32 of products of 16-bit operands.

Legend: V rows and D columns of the sum, C terms of the product, R rows of a strip.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

logger = logging.getLogger(__name__)

_wide_sum_support: dict[tuple[torch.device, torch.dtype, bool], bool] = {}


def has_wide_sums(like: Tensor) -> bool:
    """Return True if one kernel of the device adds a product of 16-bit operands to an fp32 sum.

    CUDA's matrix products do. Tried once per device and dtype, since older versions of PyTorch and
    other builds do not.
    """
    if like.device.type != "cuda":
        return False
    key = (like.device, like.dtype, isinstance(like, FakeTensor))
    if key not in _wide_sum_support:
        square = like.new_zeros(16, 16)
        try:
            add_product(square.float(), square, square)
            _wide_sum_support[key] = True
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            logger.info("loss: 16-bit products are rounded before they are summed (%s)", error)
            _wide_sum_support[key] = False
    return _wide_sum_support[key]


def add_product(
    sum_VD: Tensor, left_VC: Tensor, right_CD: Tensor, *, is_first: bool = False
) -> None:
    """Add left @ right to a sum in fp32, in place, without rounding the product. The first product
    replaces what is in memory."""
    if isinstance(sum_VD, FakeTensor):  # the kernel allocates nothing; torch 2.11 cannot fake it
        assert sum_VD.shape == (left_VC.shape[0], right_CD.shape[1])
        return
    torch.ops.aten.addmm.dtype_out(
        sum_VD, left_VC, right_CD, sum_VD.dtype, beta=int(not is_first), out=sum_VD
    )


_NUM_STRIPS = 32


def add_lower_precision(sum_VD: Tensor, product_VD: Tensor) -> None:
    """Add a product to a sum of wider dtype, in place.

    A CPU's addition first copies its narrower operand to the wider dtype, which would be one
    more gradient of the size of the vocabulary at the peak of a step; in strips of rows the
    copy has the size of a strip. CUDA's kernels convert while reading.
    """
    if sum_VD.device.type != "cpu":
        sum_VD += product_VD
        return
    for sum_RD, product_RD in zip(
        sum_VD.chunk(_NUM_STRIPS), product_VD.chunk(_NUM_STRIPS), strict=True
    ):
        sum_RD += product_RD
