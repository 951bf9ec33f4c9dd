"""The specification of NVFP4: known values, edges, blocks, shards, and torchao's codes."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from shardwright.hashing import hash_numbers
from shardwright.model.products import fp8, nvfp4
from shardwright.model.products.fp8 import Scaling
from shardwright.model.products.nvfp4 import RECIPE, TwoLevelMatrix, TwoLevelScaling
from shardwright.model.products.operand import limit_rows
from shardwright.model.products.scaled_matmul import pack_e2m1
from shardwright.model.products.scaled_product import ScaledProducts
from tests.unit.model.test_fp8 import make_matrix

ROW, SQUARE = RECIPE.output
BLOCKS_OF_A_TENSOR = TwoLevelScaling(1, 16)
SCALINGS = [ROW, SQUARE, BLOCKS_OF_A_TENSOR]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_every_number_of_the_format_and_every_tie_to_an_even_code() -> None:
    numbers = torch.tensor(E2M1)
    assert torch.equal(nvfp4.round_to_e2m1(numbers), numbers)
    assert torch.equal(nvfp4.round_to_e2m1(-numbers), -numbers)
    for code, (below, above) in enumerate(pairwise(E2M1)):
        tie = torch.tensor((below + above) / 2)
        beside = torch.stack([tie, torch.nextafter(tie, -tie), torch.nextafter(tie, 2 * tie)])
        even = below if code % 2 == 0 else above
        assert nvfp4.round_to_e2m1(beside).tolist() == [even, below, above]
        assert nvfp4.round_to_e2m1(-beside).tolist() == [-even, -below, -above]


def test_known_scales_and_values() -> None:
    # The largest magnitude is 6 x 448, so the outer scale is 1; the blocks' maxima are 2688 and 6.
    values = torch.zeros(2, 32)
    values[0, 0] = 2688.0
    values[0, 1:4] = torch.tensor([700.0, -100.0, 1300.0])
    values[1, 16:20] = torch.tensor([-6.0, 1.25, 0.2, 0.8])
    for scaling in (ROW, BLOCKS_OF_A_TENSOR):
        matrix = nvfp4.quantise(values, scaling)
        assert matrix.codes[0, :4].tolist() == [6.0, 1.5, -0.0, 3.0]
        assert matrix.codes[1, 16:20].tolist() == [-6.0, 1.0, 0.0, 1.0]
        rounded = nvfp4.dequantise(matrix)
        assert rounded[0, :4].tolist() == [2688.0, 672.0, 0.0, 1344.0]
        assert rounded[1, 16:20].tolist() == [-6.0, 1.0, 0.0, 1.0]
    assert nvfp4.quantise(values, BLOCKS_OF_A_TENSOR).outer_scales.tolist() == [[1.0]]
    assert nvfp4.quantise(values, BLOCKS_OF_A_TENSOR).block_scales.tolist() == [
        [448.0, 2.0**-6],
        [2.0**-6, 1.0],
    ]
    # Of a row, the smallest power of two that suffices: 6 / 2688 is 2^-8.8.
    matrix = nvfp4.quantise(values, ROW)
    assert matrix.outer_scales.tolist() == [[1.0], [2.0**-8]]
    assert matrix.block_scales[1].tolist() == [2.0**-6, 256.0]


def test_a_weight_has_the_same_codes_in_both_products() -> None:
    assert RECIPE.output[1] == RECIPE.input_gradient[1]
    w_NK = make_matrix(48, 64)
    straight = nvfp4.quantise(w_NK, SQUARE)
    turned = nvfp4.quantise(w_NK.t().contiguous(), SQUARE)
    assert torch.equal(straight.codes.t().float(), turned.codes.float())
    assert torch.equal(straight.block_scales.t().float(), turned.block_scales.float())
    assert straight.block_scales.shape == (3, 4)
    assert straight.outer_scales.shape == (1, 1)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_own_maxima_never_saturate(scaling: TwoLevelScaling) -> None:
    values = make_matrix(128, 128)
    counts = nvfp4.count_rounding(values, nvfp4.quantise(values, scaling))
    assert (counts.num_saturated, counts.num_nonfinite) == (0, 0)
    assert 0 < counts.num_flushed < values.numel()


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_values_saturate_with_stale_maxima_and_are_counted(scaling: TwoLevelScaling) -> None:
    values = make_matrix(64, 64)
    maxima = fp8.compute_block_maxima(values, scaling.outer)
    matrix = nvfp4.quantise(values, scaling, maxima / 8)
    # The largest block of each row, or of the tensor, has a scale of 448 and larger values.
    counts = nvfp4.count_rounding(values, matrix)
    assert counts.num_saturated > 0
    assert nvfp4.dequantise(matrix).abs().max() <= 1.001 * maxima.max() / 4


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_zeros_stay_zeros(scaling: TwoLevelScaling) -> None:
    values = make_matrix(64, 64)
    values[5] = 0.0
    values[:, 32:] = 0.0
    matrix = nvfp4.quantise(values, scaling)
    assert not nvfp4.dequantise(matrix)[values == 0].any()
    zeros = nvfp4.quantise(torch.zeros(32, 32), scaling)
    assert zeros.outer_scales.isfinite().all()
    assert not nvfp4.dequantise(zeros).any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_a_non_finite_value_shows_wherever_its_outer_scale_counts(
    scaling: TwoLevelScaling, bad: float
) -> None:
    values = make_matrix(64, 64)
    values[33, 7] = bad
    matrix = nvfp4.quantise(values, scaling)
    is_nan = nvfp4.dequantise(matrix).isnan()
    expected = torch.zeros(64, 64, dtype=torch.bool)
    expected[33 if scaling.outer.rows == 1 else slice(None)] = True
    assert torch.equal(is_nan, expected)
    assert nvfp4.count_rounding(values, matrix).num_nonfinite == 1


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (130, 33)])
def test_any_shape_is_quantised(scaling: TwoLevelScaling, shape: tuple[int, int]) -> None:
    values = make_matrix(*shape)
    rounded = nvfp4.dequantise(nvfp4.quantise(values, scaling))
    assert rounded.shape == shape
    # Half the distance between neighbours is at most a fifth of a number, or of 0.5 in a block.
    if values.numel():
        blocks = fp8.compute_block_maxima(values, scaling)
        limit = blocks.repeat_interleave(scaling.rows or 1, 0).repeat_interleave(16, 1)
        limit = limit[: shape[0], : shape[1]] / 6 * 0.3
        smallest = fp8.compute_block_maxima(values, scaling.outer) / 2688 * 2.0**-6
        assert ((rounded - values).abs() <= 0.25 * values.abs() + limit + smallest).all()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_shards_with_agreed_maxima_have_the_codes_of_the_whole(
    scaling: TwoLevelScaling, dim: int
) -> None:
    values = make_matrix(128, 128)
    whole = nvfp4.quantise(values, scaling)
    shards = values.chunk(4, dim)
    own = [nvfp4.quantise(shard, scaling) for shard in shards]
    if (scaling.outer.rows, None)[dim] is None:
        assert not torch.equal(join_bytes(own, dim), join_bytes([whole], dim))
        maxima = torch.stack([fp8.compute_block_maxima(s, scaling.outer) for s in shards]).amax(0)
        own = [nvfp4.quantise(shard, scaling, maxima) for shard in shards]
    assert torch.equal(join_bytes(own, dim), join_bytes([whole], dim))


def test_stochastic_rounding_has_the_value_as_its_mean() -> None:
    values = make_matrix(48, 80)
    num_keys = 200
    rounded = [
        nvfp4.dequantise(nvfp4.quantise(values, ROW, key=hash_numbers(7, step)))
        for step in range(num_keys)
    ]
    nearest = nvfp4.dequantise(nvfp4.quantise(values, ROW))
    # The largest number of a block may be clamped, also when it is rounded to nearest.
    scales = fp8.compute_block_maxima(values, ROW).repeat_interleave(16, 1)
    is_inside = values.abs() < 0.9 * scales
    for each in rounded:
        assert ((each - values).abs() < 2 * scales / 6 * 1.1)[is_inside].all()
    error = (torch.stack(rounded).mean(0) - values)[is_inside]
    scale = scales[is_inside]
    # The deviation of one is at most half a distance, which is at most a third of the maximum.
    assert ((error / scale).abs() < 5 * (1 / 6) * 1.1 / num_keys**0.5).all()
    # Of all elements together, far below that of rounding to nearest.
    assert (error / scale).square().mean() < 0.05 * (
        (nearest - values)[is_inside] / scale
    ).square().mean()
    assert len({each.numpy().tobytes() for each in rounded}) == num_keys


def test_stochastic_rounding_keeps_numbers_of_the_format() -> None:
    values = torch.tensor([E2M1 + [-number for number in E2M1]]) * 448
    values = torch.cat([values, torch.zeros(1, 16)])
    for step in range(20):
        matrix = nvfp4.quantise(values, ROW, key=hash_numbers(0, step))
        assert torch.equal(nvfp4.dequantise(matrix), values)
    values[1, 3] = math.nan
    assert nvfp4.dequantise(nvfp4.quantise(values, ROW, key=hash_numbers())).isnan()[1].all()


def test_random_numbers_follow_from_seed_step_and_block_only() -> None:
    values = make_matrix(64, 128)
    whole = nvfp4.quantise(values, ROW, key=hash_numbers(1, 2))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    moved = nvfp4.quantise(values[order], ROW, key=hash_numbers(1, 2))
    assert torch.equal(moved.codes.float(), whole.codes.float()[order])
    maxima = fp8.compute_block_maxima(values, ROW.outer)
    shards = [
        nvfp4.quantise(shard, ROW, maxima, hash_numbers(1, 2)) for shard in values.chunk(4, 1)
    ]
    assert torch.equal(join_bytes(shards, 1), join_bytes([whole], 1))
    for seed, step in ((1, 3), (2, 2), (1 + 2**32, 2)):
        other = nvfp4.quantise(values, ROW, key=hash_numbers(seed, step))
        share = (other.codes.float() != whole.codes.float()).float().mean()
        assert 0.1 < share < 0.5
    # Numbers of one block, and of blocks in a row, are independent.
    offsets = nvfp4._draw_offsets(make_matrix(4096, 64).clamp(-6, 6), hash_numbers(3))
    assert offsets.min() > 0
    assert offsets.max() < 1
    torch.testing.assert_close(torch.corrcoef(offsets.t()), torch.eye(64), atol=0.08, rtol=0)


def join_bytes(matrices: list[TwoLevelMatrix], dim: int) -> Tensor:
    """Join the bytes of codes, block scales and the values that they stand for."""
    parts = [
        [matrix.codes for matrix in matrices],
        [matrix.block_scales for matrix in matrices],
        [nvfp4.dequantise(matrix) for matrix in matrices],
    ]
    return torch.cat([torch.cat(part, dim).view(torch.uint8).flatten() for part in parts])


def test_shards_inside_a_block_have_other_codes() -> None:
    values = make_matrix(96, 96)
    maxima = fp8.compute_block_maxima(values, SQUARE.outer)
    parts = [nvfp4.quantise(shard, SQUARE, maxima) for shard in values.split(24, 1)]
    whole = nvfp4.quantise(values, SQUARE)
    assert not torch.equal(join_bytes(parts, 1), join_bytes([whole], 1))


def test_products_round_their_own_operands() -> None:
    """Each product equals one in fp64 of operands rounded block by block, in loops."""
    x_MK = make_matrix(32, 64, 1)
    w_NK = make_matrix(48, 64, 2)
    g_MN = make_matrix(32, 48, 3) * 1e-6
    products = ScaledProducts(RECIPE)
    x_rounded = round_in_loops(x_MK, 1, is_power_of_two=True)
    w_rounded = round_in_loops(w_NK, 16, is_power_of_two=False)
    g_rounded = round_in_loops(g_MN, 1, is_power_of_two=True)
    for result, left, right in (
        (products.compute_output(x_MK, w_NK), x_rounded, w_rounded.t()),
        (products.compute_input_gradient(g_MN, w_NK), g_rounded, w_rounded),
    ):
        scale = left.abs() @ right.abs()
        assert ((result.double() - left @ right).abs() <= 1e-6 * scale).all()
    # Weight gradients are not quantised.
    assert torch.equal(products.compute_weight_gradient(g_MN, x_MK), g_MN.t() @ x_MK)


def round_in_loops(values: Tensor, rows: int, *, is_power_of_two: bool) -> Tensor:
    """Round as the formulas state, one number at a time, in fp64. The maxima of rows are those of
    single rows if blocks have one row, else that of the tensor."""
    rounded = torch.empty_like(values, dtype=torch.float64)
    numbers = torch.tensor(E2M1, dtype=torch.float64)
    numbers = torch.cat([-numbers.flip(0), numbers])
    is_even = torch.tensor([0.5 if code % 2 else 0.0 for code in (*range(7, -1, -1), *range(8))])
    for row in range(0, values.shape[0], rows):
        outer_values = values[row] if rows == 1 else values
        outer = outer_values.abs().max().item() / (6 * 448)
        if is_power_of_two:
            outer = 2.0 ** math.ceil(math.log2(outer))
        for column in range(0, values.shape[1], 16):
            block = values[row : row + rows, column : column + 16].double()
            scale = block.abs().max().item() / 6 / outer
            scale = torch.tensor(max(scale, 2.0**-6)).to(torch.float8_e4m3fn).double() * outer
            scaled = (block / scale).clamp(-6, 6)
            # The nearest number; of two as near, the one with the even code.
            distances = (scaled[..., None] - numbers).abs() + 1e-9 * is_even
            rounded[row : row + rows, column : column + 16] = numbers[distances.argmin(-1)] * scale
    return rounded


def test_matrices_of_experts_have_outer_scales_of_their_own() -> None:
    w_ENK = torch.stack([make_matrix(32, 48, seed) * 10.0**seed for seed in range(3)])
    stacked = nvfp4.quantise(w_ENK.flatten(0, 1), limit_rows(SQUARE, 32))  # type: ignore[arg-type]
    single = [nvfp4.quantise(w_NK, SQUARE) for w_NK in w_ENK]
    assert stacked.outer_scales.shape == (3, 1)
    assert torch.equal(join_bytes([stacked], 0), join_bytes(single, 0))


def test_results_have_the_operands_dtype() -> None:
    x, w, g = (make_matrix(32, 32, seed).bfloat16() for seed in range(3))
    assert ScaledProducts(RECIPE).compute_output(x, w).dtype == torch.bfloat16
    assert ScaledProducts(RECIPE).compute_input_gradient(g, w).dtype == torch.bfloat16


def test_packed_codes_have_their_bits_in_pairs() -> None:
    codes = torch.tensor([[0.0, 0.5, 1.0, 1.5], [2.0, -3.0, 4.0, -6.0]]).to(fp8.E4M3)
    packed = pack_e2m1(codes)
    assert packed.dtype == torch.float4_e2m1fn_x2
    assert packed.view(torch.uint8).tolist() == [[0x10, 0x32], [0xD4, 0xF6]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_scales_are_torchaos(dtype: torch.dtype) -> None:
    """torchao quantises 1 x 16 blocks with any outer scales that it is given."""
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats import nvfp4_tensor

    values = make_matrix(256, 256).to(dtype)
    values[3] = 0.0
    scalings = [BLOCKS_OF_A_TENSOR, ROW, replace(ROW, outer=Scaling(1, None))]
    for scaling in scalings:
        matrix = nvfp4.quantise(values, scaling)
        scales, packed = nvfp4_tensor.nvfp4_quantize(values, per_tensor_scale=matrix.outer_scales)
        assert torch.equal(matrix.block_scales.view(torch.uint8), scales.view(torch.uint8))
        assert torch.equal(pack_e2m1(matrix.codes).view(torch.uint8), packed)
    tensor_scale = nvfp4_tensor.per_tensor_amax_to_scale(values.abs().max())
    assert torch.equal(
        nvfp4.quantise(values, BLOCKS_OF_A_TENSOR).outer_scales, tensor_scale.view(1, 1)
    )
