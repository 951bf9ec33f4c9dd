"""Products of quantised matrices by torch's kernels for 8-bit and 4-bit operands.

The kernels sum over the columns of a row-major left and the rows of a column-major right matrix.

| blocks of left and right | kernel | scales |
|---|---|---|
| tensor, tensor | `TensorWise` | fp32, `[1]` each |
| row, column | `RowWise` | fp32, `[M, 1]` and `[1, N]` |
| 1 x 128, 128 x 1 | `BlockWise1x128` twice | fp32, column-major `[M, K / 128]`, `[N, K / 128]` |
| 1 x 128, 128 x 128 | `BlockWise1x128`, `BlockWise128x128` | as above; see `_multiply_blocks` |
| 1 x 32, 32 x 1 | `BlockWise1x32` twice | E8M0 bytes, ordered by `arrange_scales` |
| 1 x 16, 16 x 16 in two levels | `BlockWise1x16`, `TensorWise` | E4M3 bytes, as above; fp32 |
| row, column of an expert | `scaled_grouped_mm` with `RowWise` | fp32, `[M]` and `[E, N]` |
| 1 x 32, 32 x 1 of an expert | the same with `BlockWise1x32` | E8M0 bytes; see `_spread_rows` |
| 1 x 128, 128 x 128 of an expert | `scaled_mm` per expert | as for one matrix |

Sources: documentation of `torch.nn.functional.scaled_mm` and the checks of its operator; cuBLAS
documentation, "Block scaling factors layout"; MSLK's `mx8mx8bf16_grouped_mm`, the kernel behind
`scaled_grouped_mm` with blocks.

Legend: M rows, K summed dim, N columns, E experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from shardwright.model.products.fp8 import QuantisedMatrix, put_in_memory
from shardwright.model.products.nvfp4 import TwoLevelMatrix
from shardwright.model.products.operand import Operand

DIM_MULTIPLE = 16
"""The kernels take a summed dim and output columns that are multiples of this."""
SUMMED_MULTIPLE_OF_4BIT = 32
"""The kernel for 4 bits takes summed dims that are multiples of this: 16 bytes."""

_TILE_ROWS = 128
_TILE_COLUMNS = 4
"""Scales of a tile of cuBLAS."""
_SCALE_ROW_MULTIPLE = 4
"""cuBLAS reads columns of fp32 scales that begin at multiples of 16 bytes."""
_E8M0_EXPONENTS = 254
"""Sum of the exponent bits of a power of two and of its inverse."""
_E4M3_OF_E2M1 = 12
"""Difference of the codes of a number from 1 to 6 in E4M3, without its two last bits, which are
zero, and in E2M1."""


def multiply_on_device(
    left: Operand, right: Operand, dtype: torch.dtype, *, is_fast: bool = False
) -> Tensor:
    """Compute left @ right, `[M, N]`, in `dtype`.

    Args:
        is_fast: leave partial sums in Hopper's tensor cores, in about 14 bits. For scales of
            tensors and rows only: scales of blocks are applied to partial sums in fp32.
    """
    has_blocks = left.scaling.columns is not None
    assert not (is_fast and has_blocks), "kernels of blocks have no fast accumulation"
    if isinstance(left, TwoLevelMatrix) or isinstance(right, TwoLevelMatrix):
        assert isinstance(left, TwoLevelMatrix)
        assert isinstance(right, TwoLevelMatrix)
        return _multiply_two_levels(left, right, dtype)
    codes_MK = _order_codes(left.codes)
    codes_KN = _order_codes(right.codes.t()).t()
    if left.codes.shape[0] == 0:
        return codes_MK.new_empty((0, codes_KN.shape[1]), dtype=dtype)
    if left.scaling.scale_format == "e8m0":
        return F.scaled_mm(
            codes_MK,
            codes_KN,
            arrange_scales(_compute_e8m0_scales(left.multipliers)),
            ScalingType.BlockWise1x32,
            arrange_scales(_compute_e8m0_scales(right.multipliers.t())),
            ScalingType.BlockWise1x32,
            swizzle_a=SwizzleType.SWIZZLE_32_4_4,
            swizzle_b=SwizzleType.SWIZZLE_32_4_4,
            output_dtype=dtype,
        )
    left_scales = left.invert_multipliers()
    right_scales = right.invert_multipliers()
    if has_blocks:
        is_square = right.scaling.columns != 1
        return _multiply_blocks(
            codes_MK, codes_KN, left_scales, right_scales, dtype, is_square=is_square
        )
    if left_scales.numel() == right_scales.numel() == 1:
        kind = ScalingType.TensorWise
        left_scales, right_scales = left_scales.view(1), right_scales.view(1)
    else:
        kind = ScalingType.RowWise
        # A single column that was transposed has the stride of a row, which the kernel refuses.
        left_scales = left_scales.expand(codes_MK.shape[0], 1).flatten().unsqueeze(1)
        right_scales = right_scales.expand(1, codes_KN.shape[1]).contiguous()
    return F.scaled_mm(
        codes_MK,
        codes_KN,
        left_scales,
        kind,
        right_scales,
        kind,
        output_dtype=dtype,
        use_fast_accum=is_fast,
    )


def _order_codes(codes_RC: Tensor) -> Tensor:
    """Return codes in row-major order; compiled code writes them once for all products.

    Inductor copies the input of a product if it is not in memory yet, for each product that reads
    it. It also merges what computes codes with reductions of rows, whose kernels would write a
    transposed matrix byte by byte. The input of `as_strided` has to be in memory.
    """
    if not torch.compiler.is_compiling():
        return codes_RC.contiguous()
    if codes_RC.t().is_contiguous():
        codes_RC = put_in_memory(codes_RC.t()).t()
    return put_in_memory(codes_RC.contiguous())


def _register_grouped_shape() -> torch.library.Library | None:
    """Let compilers and rehearsals trace the grouped kernel; torch 2.13 has no shape for it.

    Returns:
        What keeps the registration; None if torch has one, or lacks the operator.
    """
    name = "aten::_scaled_grouped_mm_v2"
    has_operator = hasattr(torch.ops.aten, "_scaled_grouped_mm_v2")
    if not has_operator or torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta"):
        return None
    library = torch.library.Library("aten", "IMPL", "Meta")
    library.impl(name, _allocate_grouped_product)
    return library


def _allocate_grouped_product(codes_MK: Tensor, codes_EKN: Tensor, *options: object) -> Tensor:
    dtype = next(option for option in options if isinstance(option, torch.dtype))
    return codes_MK.new_empty((codes_MK.shape[0], codes_EKN.shape[2]), dtype=dtype)


_grouped_shape = _register_grouped_shape()


def multiply_experts_on_device(
    left: QuantisedMatrix,
    right: QuantisedMatrix,
    counts_E: Tensor,
    dtype: torch.dtype,
    *,
    is_transposed: bool,
    is_fast: bool = False,
) -> Tensor:
    """Multiply each row by its expert's matrix, `[M, N]`, in `dtype`.

    Args:
        left: rows, sorted by expert, with one scale each, or one per block of a row.
        right: the experts' matrices below each other, with scales per row, per column or per block
            of each matrix, or one per matrix.
        counts_E: rows of each expert. The host reads them only for blocks of 128.
        is_transposed: multiply by the transposed matrices.
        is_fast: as in `multiply_on_device`.
    """
    has_blocks = left.scaling.columns is not None
    assert not (is_fast and has_blocks), "kernels of blocks have no fast accumulation"
    num_experts = counts_E.shape[0]
    codes_ERC = right.codes.unflatten(0, (num_experts, -1))
    codes_EKN = codes_ERC.mT if is_transposed else codes_ERC.mT.contiguous().mT
    codes_MK = left.codes.contiguous()
    num_rows = codes_MK.shape[0]
    num_columns = codes_EKN.shape[2]
    if num_rows == 0:
        return codes_MK.new_empty((0, num_columns), dtype=dtype)
    if has_blocks:
        is_fp32 = left.scaling.scale_format == "fp32"
        scales_RC = right.invert_multipliers() if is_fp32 else right.multipliers
        scales_ERC = scales_RC.unflatten(0, (num_experts, -1))
        # In the order of the kernel: of output columns, then of blocks of the summed dim.
        scales_ENK = scales_ERC if is_transposed else scales_ERC.mT
        if is_fp32:
            product: Tensor = _multiply_blocks_by_expert(
                codes_MK, codes_EKN, left.invert_multipliers(), scales_ENK, counts_E, dtype
            )
            return product
        kind = ScalingType.BlockWise1x32
        order = SwizzleType.SWIZZLE_32_4_4
        left_scales = _spread_rows(_compute_e8m0_scales(left.multipliers), counts_E)
        right_scales = _compute_e8m0_scales(scales_ENK).view(torch.uint8)
        right_scales = F.pad(right_scales, (0, 0, 0, -num_columns % _TILE_ROWS)).flatten(0, 1)
        scales = (
            arrange_scales(left_scales).view(left_scales.shape[0], -1),
            arrange_scales(right_scales.view(torch.float8_e8m0fnu)).view(num_experts, -1),
        )
    else:
        kind = ScalingType.RowWise
        order = SwizzleType.NO_SWIZZLE
        # Scales per output column: one per expert and row of a transposed matrix, or per column.
        scales_EN = right.invert_multipliers().reshape(num_experts, -1)
        scales = (
            left.invert_multipliers().reshape(num_rows),
            scales_EN.expand(num_experts, num_columns).contiguous(),
        )
    product_MN: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
        codes_MK,
        codes_EKN,
        scales[0],
        kind,
        scales[1],
        kind,
        swizzle_a=order,
        swizzle_b=order,
        offs=counts_E.cumsum(0).to(torch.int32),
        output_dtype=dtype,
        use_fast_accum=is_fast,
    )
    return product_MN


def arrange_scales(scales: Tensor) -> Tensor:
    """Order scales of a byte each, `[rows, blocks]`, as the tensor cores read them, flat.

    The scales are split into tiles of 128 rows and 4 blocks. Within a tile, row r is in line
    r mod 32, at place r // 32. Missing scales of the last tiles are zero bytes.
    """
    num_rows, num_blocks = scales.shape
    padding = (0, -num_blocks % _TILE_COLUMNS, 0, -num_rows % _TILE_ROWS)
    tiles = F.pad(scales.contiguous().view(torch.uint8), padding)
    tiles = tiles.unflatten(1, (-1, _TILE_COLUMNS)).unflatten(0, (-1, 4, 32))
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(scales.dtype)


def pack_e2m1(codes_RC: Tensor) -> Tensor:
    """Pack E2M1 numbers, stored as the equal E4M3 ones, two to a byte along the rows.

    The first of a pair has the lower bits. NaN, which the scales have too, becomes 6.
    """
    bytes_RC = codes_RC.contiguous().view(torch.uint8)
    signs_RC = (bytes_RC >> 4) & 0b1000
    magnitudes_RC = ((bytes_RC & 0x7F) >> 2).clamp(_E4M3_OF_E2M1, _E4M3_OF_E2M1 + 7) - _E4M3_OF_E2M1
    # 0.5 is subnormal in E2M1 only: its code would be 0.
    is_half_RC = (bytes_RC & 0x7F) == _E4M3_OF_E2M1 << 2
    numbers_RC = signs_RC | magnitudes_RC | is_half_RC
    packed = numbers_RC[:, ::2] | (numbers_RC[:, 1::2] << 4)
    return packed.view(torch.float4_e2m1fn_x2)


def _multiply_two_levels(left: TwoLevelMatrix, right: TwoLevelMatrix, dtype: torch.dtype) -> Tensor:
    """Multiply blocks of 1 x 16 by blocks of 16 x 16 with one outer scale.

    The kernel applies the outer scale of `right`. Those of the rows of `left` are powers of two,
    so that multiplying the result by them is exact.
    """
    num_rows = left.codes.shape[0]
    if num_rows == 0:
        return left.codes.new_empty((0, right.codes.shape[1]), dtype=dtype)
    kinds = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    orders = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    assert right.scaling.columns is not None
    column_scales = right.block_scales.t().repeat_interleave(right.scaling.columns, 0)
    product_MN = F.scaled_mm(
        pack_e2m1(left.codes),
        pack_e2m1(right.codes.t()).t(),
        [arrange_scales(left.block_scales), torch.ones_like(right.outer_scales).view(1)],
        kinds,
        [arrange_scales(column_scales), right.outer_scales.view(1)],
        kinds,
        swizzle_a=orders,
        swizzle_b=orders,
        output_dtype=dtype,
    )
    return product_MN * left.outer_scales.to(dtype)


def _multiply_blocks(
    codes_MK: Tensor,
    codes_KN: Tensor,
    left_scales: Tensor,
    right_scales: Tensor,
    dtype: torch.dtype,
    *,
    is_square: bool,
) -> Tensor:
    """Multiply blocks of 1 x 128 by blocks of 128 x 128 (`is_square`) or 128 x 1.

    Scales are column-major. Those of 128 x 128, `[K / 128, N / 128]`, have rows of zeros up to a
    multiple of 4.
    """
    if is_square:
        kind = ScalingType.BlockWise128x128
        right_scales = F.pad(right_scales, (0, 0, 0, -right_scales.shape[0] % 4))
    else:
        kind = ScalingType.BlockWise1x128
        right_scales = right_scales.t()
    return F.scaled_mm(
        codes_MK,
        codes_KN,
        _arrange_by_columns(left_scales),
        ScalingType.BlockWise1x128,
        _arrange_by_columns(right_scales),
        kind,
        output_dtype=dtype,
    )


def _arrange_by_columns(scales_RC: Tensor) -> Tensor:
    """Copy a matrix to column-major order; a single column has the stride of several too.

    torch 2.11 checks the strides of a single column of the left scales by those of the right.
    """
    columns = scales_RC.t().contiguous()
    return columns.as_strided(scales_RC.shape, (1, scales_RC.shape[0]))


def let_compiler_trace_kernels() -> None:
    """Let torch.compile trace the kernels of quantised operands, which torch 2.11 excludes.

    Otherwise they break the graph of a block.
    """
    for name in ("_scaled_mm_v2", "_scaled_grouped_mm_v2"):
        if hasattr(torch, name):
            torch.compiler.allow_in_graph(getattr(torch, name))


@torch.library.custom_op("shardwright::scaled_product_by_expert", mutates_args=())
def _multiply_blocks_by_expert(
    codes_MK: torch.Tensor,
    codes_EKN: torch.Tensor,
    left_scales: torch.Tensor,
    right_scales: torch.Tensor,
    counts: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply blocks of 1 x 128 by each expert's blocks of 128 x 128, `[M, N]`.

    torch has no grouped kernel for them: each expert is a product of its own, and the host reads
    the counts. `right_scales` are `[E, N / 128, K / 128]`.
    """
    sizes = counts.tolist()
    product_MN = codes_MK.new_empty((codes_MK.shape[0], codes_EKN.shape[2]), dtype=dtype)
    for codes, scales, matrix, matrix_scales, out in zip(
        codes_MK.split(sizes),
        left_scales.split(sizes),
        codes_EKN,
        right_scales,
        product_MN.split(sizes),
        strict=True,
    ):
        num_rows = codes.shape[0]
        if num_rows == 0:
            continue
        padding = (0, 0, 0, -num_rows % _SCALE_ROW_MULTIPLE)
        padded = F.pad(codes.view(torch.uint8), padding).view(codes.dtype)
        product = _multiply_blocks(
            padded, matrix, F.pad(scales, padding), matrix_scales.t(), dtype, is_square=True
        )
        out.copy_(product[:num_rows])
    return product_MN


@_multiply_blocks_by_expert.register_fake
def _fake_multiply_blocks_by_expert(
    codes_MK: Tensor,
    codes_EKN: Tensor,
    left_scales: Tensor,
    right_scales: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    return codes_MK.new_empty((codes_MK.shape[0], codes_EKN.shape[2]), dtype=dtype)


def _spread_rows(scales: Tensor, counts_E: Tensor) -> Tensor:
    """Move the rows of each expert to whole tiles of their own; zero bytes fill the tiles.

    The number of rows does not depend on the counts, so that the host need not read them.
    """
    num_rows, num_blocks = scales.shape
    ends_E = counts_E.cumsum(0)
    sizes_E = (counts_E + _TILE_ROWS - 1) // _TILE_ROWS * _TILE_ROWS
    shifts_E = (sizes_E.cumsum(0) - sizes_E) - (ends_E - counts_E)
    rows_M = torch.arange(num_rows, device=scales.device, dtype=ends_E.dtype)
    rows_M = rows_M + shifts_E[torch.searchsorted(ends_E, rows_M, right=True)]
    num_tiles = (num_rows + counts_E.shape[0] * (_TILE_ROWS - 1)) // _TILE_ROWS
    spread = torch.zeros(
        (num_tiles * _TILE_ROWS, num_blocks), dtype=torch.uint8, device=scales.device
    )
    return spread.index_copy(0, rows_M, scales.view(torch.uint8)).view(scales.dtype)


def _compute_e8m0_scales(multipliers: Tensor) -> Tensor:
    """Compute the inverse of powers of two in the format E8M0; NaN stays NaN (byte 255)."""
    exponents = multipliers.contiguous().view(torch.int32) >> 23
    return (_E8M0_EXPONENTS - exponents).to(torch.uint8).view(torch.float8_e8m0fnu)
