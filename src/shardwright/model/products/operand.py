"""Operands of few bits in any format: quantised by `fp8` or by `nvfp4`, as their scaling says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from shardwright.model.products import fp8, nvfp4
from shardwright.model.products.fp8 import (
    ProductScaling,
    QuantisedMatrix,
    RoundingCounts,
    Scaling,
)
from shardwright.model.products.nvfp4 import TwoLevelMatrix, TwoLevelScaling

Operand = QuantisedMatrix | TwoLevelMatrix

PRODUCT_SCALINGS: dict[str, ProductScaling] = {
    **fp8.RECIPES,
    "nvfp4": nvfp4.RECIPE,
}


def list_compiler_options(recipe: str) -> dict[str, Any]:
    """List Inductor's options for the code around a recipe's products.

    Codes with scales of columns are transposed in memory after reductions of rows. By default
    Inductor brings the loops of the transposition into the order of these reductions and merges
    both: a kernel that goes along rows and writes each byte of a column by itself.
    """
    operands = PRODUCT_SCALINGS[recipe].weight_gradient or ()
    has_columns = any(isinstance(each, Scaling) and each.is_column for each in operands)
    return {"loop_ordering_after_fusion": False} if has_columns else {}


def get_widest_blocks(scaling: Scaling) -> Scaling:
    """Return the blocks whose maxima decide all scales: the outer scales' if present."""
    return scaling.outer if isinstance(scaling, TwoLevelScaling) else scaling


def limit_rows(scaling: Scaling, num_rows: int) -> Scaling:
    """Return the scaling of matrices of `num_rows` below each other, each scaled by itself."""
    if isinstance(scaling, TwoLevelScaling):
        return replace(scaling, outer=limit_rows(scaling.outer, num_rows))
    return replace(scaling, rows=num_rows) if scaling.rows is None else scaling


def quantise(
    values_RC: Tensor, scaling: Scaling, maxima: Tensor | None = None, key: Tensor | None = None
) -> Operand:
    """Quantise a matrix; `maxima` are those of the widest blocks, by default its own. With a `key`,
    4-bit operands are rounded stochastically."""
    if isinstance(scaling, TwoLevelScaling):
        return nvfp4.quantise(values_RC, scaling, maxima, key)
    assert key is None, "8-bit operands are rounded to nearest"
    return fp8.quantise(values_RC, scaling, maxima)


def dequantise(operand: Operand) -> Tensor:
    """Return the values that the codes represent, in fp32."""
    if isinstance(operand, TwoLevelMatrix):
        return nvfp4.dequantise(operand)
    return fp8.dequantise(operand)


def count_rounding(values_RC: Tensor, operand: Operand) -> RoundingCounts:
    """Count the values that quantisation saturated or flushed to zero, and non-finite ones."""
    if isinstance(operand, TwoLevelMatrix):
        return nvfp4.count_rounding(values_RC, operand)
    return fp8.count_rounding(values_RC, operand)


def transpose(operand: Operand) -> Operand:
    """Transpose codes and scales. Outer scales must be those of the whole matrix."""
    codes = operand.codes.t()
    rows = operand.scaling.columns
    columns = operand.scaling.rows
    if isinstance(operand, TwoLevelMatrix):
        assert operand.scaling.outer.rows is None, "columns have no outer scales"
        scaling = replace(operand.scaling, rows=rows, columns=columns)
        return TwoLevelMatrix(codes, operand.block_scales.t(), operand.outer_scales, scaling)
    return QuantisedMatrix(
        codes,
        operand.multipliers.t(),
        replace(operand.scaling, rows=rows, columns=columns),
        None if operand.inverses is None else operand.inverses.t(),
    )


def list_scales(operand: Operand) -> list[Tensor]:
    """Return the tensors of scales or multipliers, those of the smallest blocks first."""
    if isinstance(operand, TwoLevelMatrix):
        return [operand.block_scales, operand.outer_scales]
    return [operand.multipliers]


def replace_first_scales(operand: Operand, scales: Tensor) -> Operand:
    """Replace the first tensor of `list_scales`."""
    if isinstance(operand, TwoLevelMatrix):
        return operand._replace(block_scales=scales)
    return operand._replace(multipliers=scales, inverses=None)


def has_inverse_scales(operand: Operand) -> bool:
    """Return True if kernels read the inverses of the operand's multipliers."""
    return isinstance(operand, QuantisedMatrix) and operand.scaling.scale_format != "e8m0"


def add_inverses(operand: Operand, inverses: Tensor) -> Operand:
    """Add the inverses of multipliers, so that no product computes them."""
    assert isinstance(operand, QuantisedMatrix)
    return operand._replace(inverses=inverses)


def rebuild_operand(
    codes: Tensor, scales: Sequence[Tensor], rows: int | None, columns: int | None
) -> Operand:
    """Build an operand whose rounding can be counted, from codes and `list_scales`."""
    if len(scales) == 1:
        return QuantisedMatrix(codes, scales[0], Scaling(rows, columns, codes.dtype))
    return TwoLevelMatrix(codes, scales[0], scales[1], TwoLevelScaling(rows, columns))
