"""A quantised weight in transfer between data ranks: the parts that a rank sends, and the operand.

Each rank quantises its rows of the weight, or its experts. The parts of all ranks, one after the
other, are those of the whole weight. Two products whose codes differ have parts of equal sizes, so
that one memory holds those of either: scales of blocks of equal size are as many, and a scale that
all columns share is sent once per row. A power of two is sent as its exponent, a byte.

Legend: R x C matrices below each other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.model.products.fp8 import E4M3, QuantisedMatrix, Scaling
from shardwright.model.products.nvfp4 import TwoLevelMatrix, TwoLevelScaling
from shardwright.model.products.operand import Operand, limit_rows


def list_sent_parts(operand: Operand) -> tuple[Tensor, ...]:
    """Return the parts of a rank's rows: codes as bytes `[R, C]`, and scales."""
    codes = operand.codes.view(torch.uint8)
    if isinstance(operand, TwoLevelMatrix):
        return codes, operand.block_scales.view(torch.uint8), operand.outer_scales
    multipliers = operand.multipliers
    if operand.scaling.columns is None:
        multipliers = multipliers.repeat_interleave(codes.shape[0] // multipliers.shape[0], 0)
    if operand.scaling.scale_format == "fp32":
        return codes, multipliers
    return codes, multipliers.to(torch.float8_e8m0fnu).view(torch.uint8)


class GatheredWeight(NamedTuple):
    """The parts of all ranks. They are those of the product that the last gather was for."""

    parts: tuple[Tensor, ...]
    num_matrices: int
    """Matrices below each other, each quantised by itself."""

    def read(self, scaling: Scaling) -> Operand:
        """Return the operand of a product with this scaling of the weight."""
        codes_RC = self.parts[0].view(E4M3)
        num_rows, num_columns = codes_RC.shape
        if self.num_matrices > 1:
            scaling = limit_rows(scaling, num_rows // self.num_matrices)
        if isinstance(scaling, TwoLevelScaling):
            # Ranks that share a matrix send the same outer scale.
            outer_scales = self.parts[2][: self.num_matrices]
            return TwoLevelMatrix(codes_RC, self.parts[1].view(E4M3), outer_scales, scaling)
        multipliers = self.parts[1]
        if scaling.scale_format != "fp32":
            multipliers = multipliers.view(torch.float8_e8m0fnu).float()
        if scaling.columns is None:
            multipliers = multipliers[:: scaling.rows or num_rows]
        else:
            multipliers = multipliers.reshape(-1, -(-num_columns // scaling.columns))
        return QuantisedMatrix(codes_RC, multipliers, scaling)
