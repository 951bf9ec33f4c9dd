"""Operands of 4-bit products in NVIDIA's format NVFP4: the specification, emulated on any device.

Elements are E2M1 numbers: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. 16 along the summed dim
share a block scale in E4M3, and the whole tensor, or the whole row, shares an outer scale in fp32.
With the largest magnitudes a_o of the tensor or row, and a_b of the block:

    outer scale   s_o = a_o / (6 x 448)
    block scale   s_b = e4m3(a_b / 6 / s_o), at least 2^-6, the smallest normal E4M3 number
    code          c = e2m1(clamp(v (1 / s_o) / s_b, -6, 6)), to nearest, ties to even, or
                  stochastically
    value         v' = c s_b s_o

The choices of this trainer, with their reasons in docs/decisions/0123-nvfp4.md:

    weights                     blocks of 16 x 16, one outer scale for the matrix: the output and
                                the input gradient multiply the same codes
    activations and gradients   blocks of 1 x 16, one outer scale for each row (token): a scale of
                                the tensor would span the tokens of a micro-batch. It is a power
                                of two, so that a kernel's result times the scale is exact
    weight gradients            not quantised: an outer scale of their operands spans all tokens

Gradients of outputs are rounded up or down at random, so that their mean is exact; all else to
nearest. The paper does the same, and multiplies the operands of weight gradients by a random
Hadamard matrix, which is not done here.

[Note: random numbers without places] The random number of an element is a hash of the seed, the
step, the element's place in its block, and what the block's 16 elements are when they are rounded
to halves. It does not depend on the tensor's place in a batch or on a rank, so every layout rounds
a token's gradient alike, also after it was sent to an expert. Two blocks with equal halves have
equal random numbers. A last bit of a gradient that depends on the order of a sum changes them as
rarely as it changes codes that are rounded to nearest.

Legend: R x C any matrix, B blocks of columns, S rows that have an outer scale of their own.

Sources: NVIDIA 2025, Pretraining Large Language Models with NVFP4 (arXiv 2509.25149), sections 2
and 4 and the appendix on quantisation; rounding steps and the smallest block scale, torchao's
`nvfp4_quantize`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.hashing import mix_bits
from shardwright.model.products import fp8
from shardwright.model.products.fp8 import E4M3, ProductScaling, RoundingCounts, Scaling

BLOCK = 16

LARGEST_E2M1 = 6.0
_LARGEST_SCALE = torch.finfo(E4M3).max
_SMALLEST_SCALE = torch.finfo(E4M3).tiny
_SATURATION_BOUNDARY = 7.0
"""Half-way from 6 to the number that would follow."""
_SMALLEST_MAXIMUM = 1e-12
"""Smaller outer maxima count as this, so that a tensor of zeros has a finite scale."""


@dataclass(frozen=True)
class TwoLevelScaling(Scaling):
    """Blocks with a scale in E4M3, and the larger blocks with an outer scale in fp32.

    The codes are E2M1 numbers, stored as the equal E4M3 ones, a byte each.
    """

    # A factory: torch 2.11 cannot trace a dataclass whose default is an object of its own.
    outer: Scaling = field(default_factory=lambda: Scaling(None, None))
    """Extent and format of the outer scales; all columns share one."""


_ROW_16 = TwoLevelScaling(1, BLOCK, outer=Scaling(1, None, scale_format="power_of_two"))
_SQUARE_16 = TwoLevelScaling(BLOCK, BLOCK)

RECIPE = ProductScaling((_ROW_16, _SQUARE_16), (_ROW_16, _SQUARE_16), None)


class TwoLevelMatrix(NamedTuple):
    """Codes `[R, C]`, E4M3 block scales `[R / rows, B]`, fp32 outer scales `[S, 1]`."""

    codes: Tensor
    block_scales: Tensor
    outer_scales: Tensor
    scaling: TwoLevelScaling


def quantise(
    values_RC: Tensor,
    scaling: TwoLevelScaling,
    maxima: Tensor | None = None,
    key: Tensor | None = None,
) -> TwoLevelMatrix:
    """Quantise a matrix. Where an outer scale has an infinity or a NaN, all becomes NaN.

    Args:
        maxima: of the outer scales, as from `fp8.compute_block_maxima` with `scaling.outer`;
            default: those of `values_RC`. A rank that has a part of a tensor or of its rows gives
            the maxima over all of its ranks.
        key: int32 scalar from which random numbers follow (see the note); None rounds to nearest.
    """
    block_maxima = fp8.compute_block_maxima(values_RC, scaling)
    if maxima is None:
        maxima = _reduce_block_maxima(block_maxima, scaling)
    outer_scales = _compute_outer_scales(maxima, scaling.outer)
    outer_RB = _repeat_rows(outer_scales, block_maxima)
    block_scales = _divide(_divide(block_maxima, LARGEST_E2M1), outer_RB)
    block_scales = block_scales.clamp(_SMALLEST_SCALE, _LARGEST_SCALE).to(E4M3)
    multipliers = _compute_multipliers(block_scales, outer_RB)
    scaled_RC = fp8.apply_by_block(torch.mul, values_RC.float(), multipliers, scaling)
    scaled_RC = scaled_RC.clamp(-LARGEST_E2M1, LARGEST_E2M1)
    rounded_RC = round_to_e2m1(scaled_RC) if key is None else _round_stochastically(scaled_RC, key)
    return TwoLevelMatrix(rounded_RC.to(E4M3), block_scales, outer_scales, scaling)


def dequantise(matrix: TwoLevelMatrix) -> Tensor:
    """Return the values that the codes represent, in fp32, `[R, C]`."""
    scales = matrix.block_scales.float()
    scaled_RC = fp8.apply_by_block(torch.mul, matrix.codes.float(), scales, matrix.scaling)
    return scaled_RC * _repeat_rows(matrix.outer_scales, scaled_RC)


def count_rounding(values_RC: Tensor, matrix: TwoLevelMatrix) -> RoundingCounts:
    """Count the values that quantisation saturated or flushed to zero, and non-finite ones."""
    is_finite = values_RC.isfinite()
    outer_RB = _repeat_rows(matrix.outer_scales, matrix.block_scales)
    multipliers = _compute_multipliers(matrix.block_scales, outer_RB)
    magnitudes_RC = fp8.apply_by_block(
        torch.mul, values_RC.float().abs(), multipliers, matrix.scaling
    )
    return RoundingCounts(
        num_saturated=(is_finite & (magnitudes_RC > _SATURATION_BOUNDARY)).sum(),
        num_flushed=((values_RC != 0) & (matrix.codes.float() == 0)).sum(),
        num_nonfinite=(~is_finite).sum(),
    )


def round_to_e2m1(values: Tensor) -> Tensor:
    """Round numbers of magnitudes up to 6 to E2M1, to nearest, ties to even codes; fp32."""
    # Each multiple of the distance has an even or odd code as the multiple is even or odd.
    distances = _find_distances(values)
    return (values / distances).round() * distances


def _round_stochastically(values_RC: Tensor, key: Tensor) -> Tensor:
    """Round to one of the two neighbours in E2M1 with a probability that makes the mean exact."""
    distances_RC = _find_distances(values_RC)
    offsets_RC = _draw_offsets(values_RC, key)
    return (values_RC / distances_RC).add_(offsets_RC).floor_().mul_(distances_RC)


def _draw_offsets(values_RC: Tensor, key: Tensor) -> Tensor:
    """Draw a number between 0 and 1 for each element; see the note on random numbers."""
    halves_RC = (values_RC * 2.0).round_().nan_to_num_().to(torch.int32)
    if missing := -values_RC.shape[1] % BLOCK:
        halves_RC = F.pad(halves_RC, (0, missing))
    places_C = mix_bits(torch.arange(BLOCK, dtype=torch.int32, device=values_RC.device))
    halves_RBC = halves_RC.unflatten(1, (-1, BLOCK)).mul_(places_C | 1)
    blocks_RB = halves_RBC.sum(-1, dtype=torch.int32)
    del halves_RC, halves_RBC
    bits_RBC = mix_bits(mix_bits(blocks_RB ^ key)[..., None] ^ places_C)
    bits_RBC = (bits_RBC >> 16).bitwise_and_(0xFFFF)
    offsets_RC = bits_RBC.to(torch.float32).flatten(1)[:, : values_RC.shape[1]]
    return offsets_RC.add_(0.5).mul_(2.0**-16)


def _find_distances(values: Tensor) -> Tensor:
    """Find the distance between the neighbours of each value in E2M1."""
    magnitudes = values.abs()
    distances = torch.where(magnitudes < 4.0, 1.0, 2.0)
    return torch.where(magnitudes < 2.0, 0.5, distances)


def _reduce_block_maxima(block_maxima: Tensor, scaling: TwoLevelScaling) -> Tensor:
    """Reduce the maxima of blocks to those of outer scales."""
    assert scaling.rows is not None
    rows = scaling.outer.rows
    blocks = Scaling(None if rows is None else rows // scaling.rows, None)
    return fp8.compute_block_maxima(block_maxima, blocks)


def _compute_outer_scales(maxima: Tensor, outer: Scaling) -> Tensor:
    """Compute a_o / (6 x 448) in fp32, or the next power of two; NaN for a maximum that is not
    finite."""
    largest = LARGEST_E2M1 * _LARGEST_SCALE
    clamped = maxima.clamp(min=_SMALLEST_MAXIMUM)
    scales = _divide(clamped, largest)
    if outer.scale_format == "power_of_two":
        # Without its mantissa, a number is the power of two below it; its inverse is exact.
        inverses = _divide(torch.full_like(clamped, largest), clamped)
        scales = 1.0 / (inverses.view(torch.int32) & 0x7F800000).view(torch.float32)
    return fp8.mark_nonfinite(scales, maxima)


def _compute_multipliers(block_scales: Tensor, outer_RB: Tensor) -> Tensor:
    """Compute (1 / s_o) / s_b for each block, fp32."""
    return _divide(_divide(torch.ones_like(outer_RB), outer_RB), block_scales.float())


def _divide(dividends: Tensor, divisors: Tensor | float) -> Tensor:
    """Divide in fp32, rounded to nearest. Compiled code may compute an fp32 quotient as a product;
    one in fp64 that is rounded to fp32 has the same bits."""
    wide = divisors.double() if isinstance(divisors, Tensor) else divisors
    return (dividends.double() / wide).float()


def _repeat_rows(outer_scales: Tensor, like: Tensor) -> Tensor:
    """Repeat each outer scale for its rows of `like`, `[rows of like, 1]`."""
    return outer_scales.repeat_interleave(like.shape[0] // max(1, outer_scales.shape[0]), 0)
