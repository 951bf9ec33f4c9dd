"""CUDA's kernels for operands of 8 and 4 bits: torch's own checks, then plain arithmetic.

The checks are those of torch's meta kernels, which test shapes, strides and dtypes as CUDA does.
The scales are read from memory as cuBLAS documents their layouts, independent of the package.
Legend: M rows, K summed dim, N columns, E experts, R rows of one operand.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

_TENSOR, _ROW, _ROW_32, _ROW_128, _SQUARE_128 = (
    int(getattr(ScalingType, name).value)
    for name in ("TensorWise", "RowWise", "BlockWise1x32", "BlockWise1x128", "BlockWise128x128")
)
_BLOCK_16 = int(ScalingType.BlockWise1x16.value)
_SWIZZLED = int(SwizzleType.SWIZZLE_32_4_4.value)
_UNSWIZZLED = int(SwizzleType.NO_SWIZZLE.value)
_GROUPED_DTYPE = torch.float8_e4m3fn


def _describe(x: Tensor) -> Tensor:
    """Return a tensor without data, of the same shape and strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _read_tiles(scales: Tensor, num_rows: int, num_blocks: int) -> Tensor:
    """Read scales of a byte at the offsets that cuBLAS documents, fp32 `[rows, blocks]`."""
    row = torch.arange(num_rows, device=scales.device)[:, None]
    block = torch.arange(num_blocks, device=scales.device)
    tile = row // 128 * -(-num_blocks // 4) + block // 4
    offsets = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    if scales.dtype == torch.float8_e4m3fn:
        return scales.view(torch.uint8)[offsets].view(torch.float8_e4m3fn).float()
    exponents = scales.view(torch.uint8)[offsets].float()
    powers = torch.exp2(exponents - 127)
    return torch.where(exponents == 255, torch.nan, powers)


def _expand_scales(scales: Tensor, kind: int, num_rows: int, num_summed: int) -> Tensor:
    """Return the scale of each element of an operand `[R, K]`."""
    if kind == _TENSOR:
        return scales.view(1, 1)
    if kind == _ROW:
        return scales.reshape(num_rows, 1)
    if kind == _ROW_32:
        return _read_tiles(scales, num_rows, num_summed // 32).repeat_interleave(32, 1)
    if kind == _ROW_128:
        return scales.repeat_interleave(128, 1)
    assert kind == _SQUARE_128, kind
    blocks = scales[: num_summed // 128].t()
    return blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)


def _unpack(packed: Tensor) -> Tensor:
    """Return the numbers of packed E2M1 rows, fp32; the lower bits are the first of a pair."""
    codes = packed.view(torch.uint8)
    pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    exponents = (pairs >> 1) & 3
    fractions = (pairs & 1) / 2
    # Exponent 0 is that of subnormal numbers.
    magnitudes = torch.where(
        exponents == 0, fractions, (1 + fractions) * torch.exp2(exponents.float() - 1)
    )
    return torch.where(pairs > 7, -magnitudes, magnitudes)


def _multiply_4bit(
    left_MK: Tensor, right_KN: Tensor, scale_a: list[Tensor], scale_b: list[Tensor]
) -> Tensor:
    """Multiply packed E2M1 numbers with block scales, and by both scales of the tensors."""
    operands = []
    for packed, scales in ((left_MK, scale_a), (right_KN.t(), scale_b)):
        numbers = _unpack(packed)
        blocks = _read_tiles(scales[0], numbers.shape[0], numbers.shape[1] // 16)
        operands.append(numbers * blocks.repeat_interleave(16, 1))
    return (operands[0] @ operands[1].t()) * (scale_a[1] * scale_b[1])


def _multiply_scaled(
    left_MK: Tensor,
    right_KN: Tensor,
    scale_a: list[Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    bias: Tensor | None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: tuple[int, ...] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    checked = torch.ops.aten._scaled_mm_v2(
        _describe(left_MK),
        _describe(right_KN),
        [_describe(scales) for scales in scale_a],
        recipe_a,
        swizzle_a,
        [_describe(scales) for scales in scale_b],
        recipe_b,
        swizzle_b,
        bias,
        out_dtype,
        contraction_dim,
        use_fast_accum,
    )
    assert bias is None
    assert {left_MK.dtype, right_KN.dtype} != {torch.float8_e5m2}, "cuBLAS has no e5m2 by e5m2"
    assert left_MK.shape[0] > 0, "cuBLAS refuses an empty matrix"
    if recipe_a == [_BLOCK_16, _TENSOR]:
        assert recipe_b == recipe_a
        assert swizzle_a == swizzle_b == [_SWIZZLED, _UNSWIZZLED]
        return _multiply_4bit(left_MK, right_KN, scale_a, scale_b).to(checked.dtype)
    num_rows, num_summed = left_MK.shape
    num_columns = right_KN.shape[1]
    if recipe_a == [_ROW_32]:
        assert swizzle_a == swizzle_b == [_SWIZZLED]
        assert scale_a[0].is_contiguous()
        assert scale_b[0].is_contiguous()
    left = left_MK.float() * _expand_scales(scale_a[0], recipe_a[0], num_rows, num_summed)
    right = right_KN.t().float() * _expand_scales(scale_b[0], recipe_b[0], num_columns, num_summed)
    return (left @ right.t()).to(checked.dtype)


def _multiply_groups(
    left_MK: Tensor,
    right_EKN: Tensor,
    scale_a: list[Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: tuple[int, ...] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    assert recipe_a == recipe_b
    assert offs is not None
    assert offs.dtype == torch.int32
    # Version 1 of the operator has the checks for CUDA; version 2 has none without a device.
    checked = torch.ops.aten._scaled_grouped_mm(
        _describe(left_MK),
        _describe(right_EKN),
        _describe(scale_a[0]),
        _describe(scale_b[0]),
        _describe(offs),
        bias,
        None,
        out_dtype,
        use_fast_accum,
    )
    assert left_MK.shape[1] % 16 == right_EKN.shape[2] % 16 == 0
    out_MN = torch.empty(checked.shape, dtype=checked.dtype, device=left_MK.device)
    ends = list((ctypes.c_int32 * offs.numel()).from_address(offs.data_ptr()))
    assert ends[-1] == left_MK.shape[0]
    num_summed, num_columns = right_EKN.shape[1:]
    first_tile_row = 0
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        left = left_MK[start:end].float()
        right = right_EKN[expert].float()
        if recipe_a == [_ROW]:
            left_scales = scale_a[0][start:end, None]
            right_scales = scale_b[0][expert, None]
        else:
            assert recipe_a == [_ROW_32], "torch has no other grouped kernel for 8 bits"
            assert swizzle_a == swizzle_b == [_SWIZZLED]
            # As MSLK's kernel: the scales of an expert begin with a tile.
            own_scales = scale_a[0].flatten()[first_tile_row * scale_a[0].shape[1] :]
            left_scales = _expand_scales(own_scales, _ROW_32, end - start, num_summed)
            right_scales = _expand_scales(scale_b[0][expert], _ROW_32, num_columns, num_summed).t()
            first_tile_row += -(-(end - start) // 128) * 128
        out_MN[start:end] = ((left * left_scales) @ (right * right_scales)).to(checked.dtype)
    return out_MN


def register(library: torch.library.Library) -> None:
    """Register the operators for CUDA."""
    library.impl("_scaled_mm_v2", _multiply_scaled, "CUDA")
    library.impl("_scaled_grouped_mm_v2", _multiply_groups, "CUDA")
