"""Working operands: both sets of codes of a weight, quantised once per update (`working_weights`).

They take the bytes of a working weight, two per element: one for the output and one for the input
gradient. Each set is in the order in which the device's kernel reads it, so that no product
copies it. The matrices of experts keep their order; two equal sets of theirs are one.

Legend: E experts, N output features, K input features, R x C any matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.model.products.fp8 import (
    ProductScaling,
    QuantisedMatrix,
    Scaling,
    put_in_memory,
)
from shardwright.model.products.operand import (
    Operand,
    add_inverses,
    has_inverse_scales,
    limit_rows,
    list_scales,
    quantise,
)


class WorkingOperands(NamedTuple):
    """Operands of a weight, whose memory each update fills again."""

    output: Operand
    input_gradient: Operand
    dtype: torch.dtype
    """Precision of the values that are quantised, and of the products that read them."""
    column_codes: Tensor | None = None
    """Memory of the codes for the input gradient, `[K, N]`, if its columns have a scale each.

    Compiled code writes other codes in both orders at once, by tiles. Those of columns are computed
    in a reduction over rows, which would write them byte by byte. So they are transposed
    afterwards, in a pass over bytes."""

    def list_sets(self) -> list[Operand]:
        """Return the operands, or one if it is that of both products."""
        if self.input_gradient is self.output:
            return [self.output]
        return [self.output, self.input_gradient]


def allocate_operands(
    weight: Tensor, scaling: ProductScaling, dtype: torch.dtype, *, is_emulated: bool
) -> WorkingOperands:
    """Allocate operands of a weight, `[N, K]` or `[E, N, K]`."""
    is_stack = weight.ndim == 3
    scalings = (scaling.output[1], scaling.input_gradient[1])
    output = _allocate(weight, scalings[0], dtype, is_column_major=False)
    if is_stack and scalings[0] == scalings[1]:
        return WorkingOperands(output, output, dtype)
    is_column_major = not (is_stack or is_emulated)
    input_gradient = _allocate(weight, scalings[1], dtype, is_column_major=is_column_major)
    has_columns = isinstance(scalings[1], Scaling) and scalings[1].is_column
    column_codes = input_gradient.codes.t() if is_column_major and has_columns else None
    return WorkingOperands(output, input_gradient, dtype, column_codes)


def list_tensors(operand: Operand) -> list[Tensor]:
    """Return the tensors of codes and scales, and of the inverses that kernels read."""
    tensors = [operand.codes, *list_scales(operand)]
    if isinstance(operand, QuantisedMatrix) and operand.inverses is not None:
        tensors.append(operand.inverses)
    return tensors


def fill_operands(
    weight: Tensor, operands: WorkingOperands, maxima: Sequence[Tensor | None]
) -> None:
    """Quantise a weight into both operands; `maxima` as for `quantise`, one per operand."""
    values_RC = weight.to(operands.dtype).flatten(0, -2)
    known: dict[Scaling, Operand] = {}
    for operand, block_maxima in zip(operands.list_sets(), maxima, strict=False):
        scaling = operand.scaling
        if scaling not in known:
            known[scaling] = _invert_scales(quantise(values_RC, scaling, block_maxima))
        targets = list_tensors(operand)
        sources = list_tensors(known[scaling])
        if operand is operands.input_gradient and operands.column_codes is not None:
            targets[0] = operands.column_codes
            sources[0] = put_in_memory(sources[0]).t()
        for tensor, source in zip(targets, sources, strict=True):
            tensor.copy_(source)


def _invert_scales(operand: Operand) -> Operand:
    """Compute the inverses that kernels of fp32 scales read, so that no product computes them."""
    if not has_inverse_scales(operand):
        return operand
    assert isinstance(operand, QuantisedMatrix)
    return add_inverses(operand, operand.invert_multipliers())


def _allocate(
    weight: Tensor, scaling: Scaling, dtype: torch.dtype, *, is_column_major: bool
) -> Operand:
    if weight.ndim == 3:
        scaling = limit_rows(scaling, weight.shape[1])
    # Quantised on the meta device, an operand has the shapes and dtypes of its tensors.
    values_RC = torch.empty(weight.flatten(0, -2).shape, dtype=dtype, device="meta")
    operand = _invert_scales(quantise(values_RC, scaling))

    def allocate(part: Tensor, *, is_column_major: bool = False) -> Tensor:
        shape = part.t().shape if is_column_major else part.shape
        memory = torch.empty(shape, dtype=part.dtype, device=weight.device)
        return memory.t() if is_column_major else memory

    codes = allocate(operand.codes, is_column_major=is_column_major)
    if isinstance(operand, QuantisedMatrix):
        inverses = None if operand.inverses is None else allocate(operand.inverses)
        return operand._replace(
            codes=codes, multipliers=allocate(operand.multipliers), inverses=inverses
        )
    return operand._replace(
        codes=codes,
        block_scales=allocate(operand.block_scales),
        outer_scales=allocate(operand.outer_scales),
    )
