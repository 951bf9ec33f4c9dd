"""Operands of 8-bit products: the specification, computed by emulation on any device.

A linear layer has three products (`scaled_product`). Each quantises both operands, so that the
elements of a block share one scale, and sums in fp32 (in fp64 if the operands are fp64):

    output           y = x w^T      sums over K
    input gradient   dx = g w       sums over N
    weight gradient  dw = g^T x     sums over M

Quantisation of a block with largest magnitude a, in a format with largest number F:

    multiplier   m = F / a, rounded to fp32, or down to a power of two
    code         c = round(clamp(v m, -F, F)), to nearest, ties to even; the block's own maximum
                 leaves nothing to clamp, since |v m| is F or less, or its neighbour in fp32
    value        v' = c / m, in fp32

Scales follow from the current values only (dynamic scaling). Arithmetic is exact or rounded to
nearest in fp32 and fp64, so all devices compute the same bytes; maxima are exact in any order.

Legend: M tokens, N output features, K input features, R x C any matrix.

Sources: formats, Micikevicius et al. 2022 (arXiv 2209.05433), table 1; tensorwise and rowwise,
torchao's float8 training recipes; blocks of 1x128 and 128x128, DeepSeek-V3 (arXiv 2412.19437),
section 3.3.2; blocks of 32 with power-of-two scales, OCP Microscaling Formats 1.0, and the
rounding up of their scales, Mishra et al. 2025 (arXiv 2506.08027).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

_SATURATION_BOUNDARIES = {E4M3: 464.0, E5M2: 61440.0}
"""Half-way from a format's largest number to the one that would follow."""
_SMALLEST_MAXIMUM = 1e-12
"""Smaller maxima count as this, so that a block of zeros has a finite scale (as in torchao)."""
_NAN_BITS = 0x7FC00000
"""Bits of an fp32 NaN."""
_SMALLEST_E8M0_MAXIMUM = torch.finfo(E4M3).max * 2.0**-127
"""Maximum whose scale is 2^-127, the smallest of the format E8M0."""

ScaleFormat = Literal["fp32", "power_of_two", "e8m0"]


@dataclass(frozen=True)
class Scaling:
    """Blocks of an operand that share a scale, and the formats of codes and scales.

    `rows` and `columns` are a block's size in the operand as it is stored (x `[M, K]`, w
    `[N, K]`, g `[M, N]`); None is the whole dim. `e8m0` scales are powers of two from 2^-127.
    """

    rows: int | None
    columns: int | None
    code_dtype: torch.dtype = E4M3
    scale_format: ScaleFormat = "fp32"

    @property
    def is_whole(self) -> bool:
        """True if one scale covers the operand."""
        return self.rows is None and self.columns is None

    @property
    def is_column(self) -> bool:
        """True if each column has a scale."""
        return self.rows is None and self.columns == 1


@dataclass(frozen=True)
class ProductScaling:
    """Scaling of both operands of the three products.

    A weight gradient of None multiplies in the precision of the operands.
    """

    output: tuple[Scaling, Scaling]
    """Scaling of x and of w."""
    input_gradient: tuple[Scaling, Scaling]
    """Scaling of g and of w."""
    weight_gradient: tuple[Scaling, Scaling] | None
    """Scaling of g and of x."""


_TENSOR = Scaling(None, None)
_TENSOR_E5M2 = Scaling(None, None, E5M2)
_ROW = Scaling(1, None, scale_format="power_of_two")
_COLUMN = Scaling(None, 1, scale_format="power_of_two")
_ROW_128 = Scaling(1, 128)
_COLUMN_128 = Scaling(128, 1)
_SQUARE_128 = Scaling(128, 128)
_ROW_32 = Scaling(1, 32, scale_format="e8m0")
_COLUMN_32 = Scaling(32, 1, scale_format="e8m0")

RECIPES = {
    "tensorwise": ProductScaling(
        (_TENSOR, _TENSOR), (_TENSOR_E5M2, _TENSOR), (_TENSOR_E5M2, _TENSOR)
    ),
    "rowwise": ProductScaling((_ROW, _ROW), (_ROW, _COLUMN), (_COLUMN, _COLUMN)),
    "rowwise_with_gw_hp": ProductScaling(
        (_ROW, _ROW), (_ROW, Scaling(None, None, scale_format="power_of_two")), None
    ),
    "blockwise": ProductScaling(
        (_ROW_128, _SQUARE_128), (_ROW_128, _SQUARE_128), (_COLUMN_128, _COLUMN_128)
    ),
    "mxfp8": ProductScaling((_ROW_32, _ROW_32), (_ROW_32, _COLUMN_32), (_COLUMN_32, _COLUMN_32)),
}
"""The block of every operand lies along the dim that its product sums over, or is square."""


class QuantisedMatrix(NamedTuple):
    """Codes `[R, C]` and one fp32 multiplier per block; value = code / multiplier."""

    codes: Tensor
    multipliers: Tensor
    scaling: Scaling
    inverses: Tensor | None = None
    """1 / multipliers, which kernels read; None computes them in each product."""

    def invert_multipliers(self) -> Tensor:
        """Return 1 / multipliers, fp32."""
        return 1.0 / self.multipliers if self.inverses is None else self.inverses


class RoundingCounts(NamedTuple):
    """Elements that quantisation changed beyond rounding, int64 scalars on the device."""

    num_saturated: Tensor
    """Finite, but clamped to the largest number. Zero if the block's own maximum sets its scale."""
    num_flushed: Tensor
    """Not zero, but rounded to zero."""
    num_nonfinite: Tensor
    """Infinite or NaN."""


def compute_block_maxima(values_RC: Tensor, scaling: Scaling) -> Tensor:
    """Compute the largest magnitude of each block, fp32, `[row blocks, column blocks]`.

    A block with a NaN has the maximum infinity: maxima over ranks may lose a NaN. The last block
    of a dim may be smaller than the others; a whole dim without elements is one block of zeros.
    Blocks of whole rows reduce each row first: compiled code then finds these maxima together with
    others of the rows, or has them already.
    """
    if scaling.columns is None and scaling.rows != 1:
        maxima = compute_block_maxima(values_RC, Scaling(1, None))
        return _split_into_blocks(maxima, scaling).amax((1, 3))
    maxima = _split_into_blocks(values_RC.detach().float().abs(), scaling).amax((1, 3))
    return torch.where(maxima.isnan(), torch.inf, maxima)


def quantise(values_RC: Tensor, scaling: Scaling, maxima: Tensor | None = None) -> QuantisedMatrix:
    """Quantise a matrix. A block with an infinity or a NaN becomes NaN, so that it shows.

    Args:
        maxima: as from `compute_block_maxima`; default: those of `values_RC`. A rank that has a
            part of a block gives the maxima over all of its ranks.
    """
    block_maxima = compute_block_maxima(values_RC, scaling) if maxima is None else maxima
    multipliers = _compute_multipliers(block_maxima, scaling)
    if torch.compiler.is_compiling():
        # Otherwise the kernel that writes codes divides in fp64 again, once per thread or element.
        multipliers = put_in_memory(multipliers)
    scaled_RC = apply_by_block(torch.mul, values_RC.float(), multipliers, scaling)
    if maxima is not None:
        # Clamped in fp32: casts of older torch do not saturate, nor does e5m2's in any version.
        largest = torch.finfo(scaling.code_dtype).max
        scaled_RC = scaled_RC.clamp(-largest, largest)
    return QuantisedMatrix(scaled_RC.to(scaling.code_dtype), multipliers, scaling)


def put_in_memory(tensor: Tensor) -> Tensor:
    """Return the same tensor; compiled code writes it in this order before it reads it."""
    return tensor.as_strided(tensor.shape, tensor.stride())


def dequantise(matrix: QuantisedMatrix) -> Tensor:
    """Return the values that the codes represent, in fp32, `[R, C]`."""
    return apply_by_block(torch.div, matrix.codes.float(), matrix.multipliers, matrix.scaling)


def count_rounding(values_RC: Tensor, matrix: QuantisedMatrix) -> RoundingCounts:
    """Count the values that quantisation saturated or flushed to zero, and non-finite ones."""
    is_finite = values_RC.isfinite()
    magnitudes_RC = apply_by_block(
        torch.mul, values_RC.float().abs(), matrix.multipliers, matrix.scaling
    )
    boundary = _SATURATION_BOUNDARIES[matrix.scaling.code_dtype]
    return RoundingCounts(
        num_saturated=(is_finite & (magnitudes_RC > boundary)).sum(),
        num_flushed=((values_RC != 0) & (matrix.codes.float() == 0)).sum(),
        num_nonfinite=(~is_finite).sum(),
    )


def _compute_multipliers(maxima: Tensor, scaling: Scaling) -> Tensor:
    """Compute F / maximum for each block, fp32; NaN where the maximum is not finite."""
    smallest = _SMALLEST_E8M0_MAXIMUM if scaling.scale_format == "e8m0" else _SMALLEST_MAXIMUM
    # In fp64, rounded once: compiled code may compute an fp32 quotient as a product.
    largest = torch.finfo(scaling.code_dtype).max
    multipliers = (largest / maxima.double().clamp(min=smallest)).float()
    if scaling.scale_format != "fp32":
        # Without its mantissa, a number is the power of two below it. log2 is not exact.
        multipliers = (multipliers.view(torch.int32) & 0x7F800000).view(torch.float32)
    return mark_nonfinite(multipliers, maxima)


def mark_nonfinite(scales: Tensor, maxima: Tensor) -> Tensor:
    """Return fp32 scales, with NaN where the maximum is not finite.

    The constant is the bits of a NaN: a NaN differs from itself, so torch would not merge equal
    quantisations in compiled code.
    """
    return torch.where(maxima.isfinite(), scales.view(torch.int32), _NAN_BITS).view(torch.float32)


def apply_by_block(
    operation: Callable[[Tensor, Tensor], Tensor],
    values_RC: Tensor,
    multipliers: Tensor,
    scaling: Scaling,
) -> Tensor:
    """Multiply each block by its multiplier, or divide, `[R, C]`."""
    blocks = operation(_split_into_blocks(values_RC, scaling), multipliers[:, None, :, None])
    return blocks.flatten(2, 3).flatten(0, 1)[: values_RC.shape[0], : values_RC.shape[1]]


def _split_into_blocks(values_RC: Tensor, scaling: Scaling) -> Tensor:
    """Reshape to `[row blocks, rows, column blocks, columns]`; zeros fill the last blocks."""
    num_rows, num_columns = values_RC.shape
    rows = scaling.rows or max(1, num_rows)
    columns = scaling.columns or max(1, num_columns)
    # A whole dim is one block, also without elements.
    missing_rows = -num_rows % rows if scaling.rows else rows - num_rows
    missing_columns = -num_columns % columns if scaling.columns else columns - num_columns
    if missing_rows or missing_columns:
        values_RC = F.pad(values_RC, (0, missing_columns, 0, missing_rows))
    return values_RC.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
