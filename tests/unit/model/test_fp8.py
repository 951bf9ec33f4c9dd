"""The specification of products of 8-bit operands: known values, edges, blocks, and shards."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shardwright.model.products import fp8
from shardwright.model.products.fp8 import E4M3, E5M2, RECIPES, Scaling
from shardwright.model.products.scaled_product import ScaledProducts

TENSOR = Scaling(None, None)
ROW = Scaling(1, None, scale_format="power_of_two")
ROW_32 = Scaling(1, 32, scale_format="e8m0")
SCALINGS = sorted(
    {
        scaling
        for recipe in RECIPES.values()
        for pair in (recipe.output, recipe.input_gradient, recipe.weight_gradient)
        for scaling in pair or ()
    },
    key=str,
)


def make_matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Values of about nine decades, so that blocks have different scales."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    return values * torch.exp(3 * torch.randn(rows, columns, generator=generator))


def test_known_values_of_both_formats() -> None:
    # The maximum is the format's largest number, so the multiplier is 1. Neighbours of 16 are 2
    # apart in e4m3 and 4 apart in e5m2; ties go to the even code.
    values = torch.tensor([[448.0, 17.0, 19.0, -18.5, 2.0**-9, 2.0**-10, 0.3]])
    rounded = fp8.dequantise(fp8.quantise(values, TENSOR))
    assert rounded.tolist() == [[448.0, 16.0, 20.0, -18.0, 2.0**-9, 0.0, 0.3125]]
    values = torch.tensor([[57344.0, 18.0, 22.0, -17.0, 2.0**-16, 2.0**-17]])
    rounded = fp8.dequantise(fp8.quantise(values, Scaling(None, None, E5M2)))
    assert rounded.tolist() == [[57344.0, 16.0, 24.0, -16.0, 2.0**-16, 0.0]]


def test_known_multipliers() -> None:
    values = torch.tensor([[3.0, -7.0], [0.5, 0.25]])
    assert fp8.quantise(values, TENSOR).multipliers.tolist() == [[64.0]]
    assert fp8.quantise(values, ROW).multipliers.tolist() == [[64.0], [512.0]]
    assert fp8.quantise(values / 7, TENSOR).multipliers.item() == pytest.approx(448.0)


@pytest.mark.parametrize("code_dtype", [E4M3, E5M2])
def test_codes_saturate_and_are_counted(code_dtype: torch.dtype) -> None:
    # A stale maximum: the values have grown since.
    values = torch.tensor([[1.0, -1.0, 100.0, -1e30, 1e-12]])
    scaling = Scaling(None, None, code_dtype)
    matrix = fp8.quantise(values, scaling, maxima=torch.ones(1, 1))
    assert fp8.dequantise(matrix)[0, :4].tolist() == [1.0, -1.0, 1.0, -1.0]
    counts = fp8.count_rounding(values, matrix)
    assert [count.item() for count in counts] == [2, 1, 0]


@pytest.mark.parametrize(
    "scaling", sorted({replace(each, rows=1, columns=None) for each in SCALINGS}, key=str), ids=str
)
def test_own_maxima_leave_nothing_to_clamp(scaling: Scaling) -> None:
    # Values are clamped where maxima are given.
    generator = torch.Generator().manual_seed(0)
    exponents_R1 = torch.randint(-140, 120, (20_000, 1), generator=generator)
    maxima_R1 = (1 + torch.rand(20_000, 1, generator=generator)) * 2.0**exponents_R1
    below_R1 = torch.nextafter(maxima_R1, torch.zeros(()))
    values_RC = torch.cat([maxima_R1, -maxima_R1, below_R1, maxima_R1 / 3], dim=1)
    own = fp8.quantise(values_RC, scaling).codes
    clamped = fp8.quantise(values_RC, scaling, fp8.compute_block_maxima(values_RC, scaling)).codes
    assert torch.equal(own.view(torch.uint8), clamped.view(torch.uint8))
    assert own.float().isfinite().all()


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_own_maxima_never_saturate(scaling: Scaling) -> None:
    values = make_matrix(128, 128)
    counts = fp8.count_rounding(values, fp8.quantise(values, scaling))
    assert counts.num_saturated == 0
    assert counts.num_nonfinite == 0


def test_smaller_blocks_flush_fewer_values() -> None:
    values = make_matrix(128, 128)
    tensor, block = (
        fp8.count_rounding(values, fp8.quantise(values, scaling)).num_flushed.item()
        for scaling in (TENSOR, ROW_32)
    )
    assert 0 < block < tensor / 10


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_zeros_stay_zeros(scaling: Scaling) -> None:
    values = make_matrix(128, 256)
    values[5] = 0.0
    values[:, 128:] = 0.0
    matrix = fp8.quantise(values, scaling)
    assert matrix.multipliers.isfinite().all()
    assert not fp8.dequantise(matrix)[values == 0].any()
    assert fp8.count_rounding(torch.zeros(3, 4), fp8.quantise(torch.zeros(3, 4), scaling)) == (
        0,
        0,
        0,
    )


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_a_non_finite_value_turns_its_block_into_nan(scaling: Scaling, bad: float) -> None:
    values = make_matrix(256, 256)
    values[130, 7] = bad
    matrix = fp8.quantise(values, scaling)
    block = torch.zeros(256, 256, dtype=torch.bool)
    rows = scaling.rows or 256
    columns = scaling.columns or 256
    first_row = 130 // rows * rows
    first_column = 7 // columns * columns
    block[first_row : first_row + rows, first_column : first_column + columns] = True
    assert torch.equal(fp8.dequantise(matrix).isnan(), block)
    assert fp8.count_rounding(values, matrix).num_nonfinite == 1


@pytest.mark.parametrize("scaling", [s for s in SCALINGS if s.scale_format != "fp32"], ids=str)
def test_scales_are_the_smallest_sufficient_powers_of_two(scaling: Scaling) -> None:
    values = make_matrix(256, 256)
    matrix = fp8.quantise(values, scaling)
    mantissas, _ = torch.frexp(matrix.multipliers)
    assert (mantissas == 0.5).all()
    largest = fp8.compute_block_maxima(values, scaling) * matrix.multipliers
    assert (largest <= 448.0).all()
    assert (largest > 224.0).all()


def test_power_of_two_scales_are_exact_beside_a_power_of_two() -> None:
    # An fp32 logarithm rounds the next number above 448 x 2^e down to it, for most e.
    exponents = torch.arange(-30, 31)
    maxima = torch.ldexp(torch.full((61,), 448.0), exponents)
    expected = torch.ldexp(torch.ones(61), -exponents)
    above = torch.nextafter(maxima, torch.tensor(torch.inf))
    for scaling in (ROW, ROW_32):
        assert torch.equal(fp8.quantise(maxima[:, None], scaling).multipliers[:, 0], expected)
        assert torch.equal(fp8.quantise(above[:, None], scaling).multipliers[:, 0], expected / 2)


def test_e8m0_scales_reach_the_smallest_numbers() -> None:
    values = torch.full((1, 32), 2.0**-120)
    assert torch.equal(fp8.dequantise(fp8.quantise(values, ROW_32)), values)
    assert fp8.quantise(torch.zeros(1, 32), ROW_32).multipliers.item() == 2.0**127


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (130, 33)])
def test_any_shape_is_quantised(scaling: Scaling, shape: tuple[int, int]) -> None:
    values = make_matrix(*shape)
    matrix = fp8.quantise(values, scaling)
    rounded = fp8.dequantise(matrix)
    assert rounded.shape == shape
    # Half the distance between neighbours: relative for normal numbers, fixed for subnormal ones.
    relative, subnormal = {E4M3: (2.0**-4, 2.0**-10), E5M2: (2.0**-3, 2.0**-17)}[scaling.code_dtype]
    if values.numel():
        smallest = subnormal / matrix.multipliers.min()
        assert ((rounded - values).abs() <= relative * values.abs() + smallest).all()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_shards_with_agreed_maxima_have_the_codes_of_the_whole(scaling: Scaling, dim: int) -> None:
    """A shard needs maxima over ranks only where its blocks span the sharded dim."""
    values = make_matrix(512, 512)
    whole = fp8.quantise(values, scaling)
    shards = values.chunk(4, dim)
    block = (scaling.rows, scaling.columns)[dim]
    if block is None:
        own = [fp8.quantise(shard, scaling).codes for shard in shards]
        assert not torch.equal(torch.cat(own, dim).float(), whole.codes.float())
        maxima = torch.stack([fp8.compute_block_maxima(each, scaling) for each in shards]).amax(0)
        codes = [fp8.quantise(shard, scaling, maxima).codes for shard in shards]
    else:
        codes = [fp8.quantise(shard, scaling).codes for shard in shards]
    assert torch.equal(torch.cat(codes, dim).view(torch.uint8), whole.codes.view(torch.uint8))


def test_shards_off_the_block_boundary_have_other_codes() -> None:
    values = make_matrix(512, 512)
    for scaling, size in ((ROW_32, 48), (Scaling(128, 128), 96), (Scaling(128, 1), 96)):
        dim = 0 if scaling.rows == 128 else 1
        codes = torch.cat(
            [fp8.quantise(each, scaling).codes for each in values.split(size, dim)], dim
        )
        assert not torch.equal(codes.float(), fp8.quantise(values, scaling).codes.float())


@pytest.mark.parametrize("name", RECIPES)
def test_products_round_their_own_operands(name: str) -> None:
    """Each product equals fp32 products of operands rounded block by block, in loops."""
    recipe = RECIPES[name]
    x_MK = make_matrix(128, 128, 1)
    w_NK = make_matrix(256, 128, 2)
    g_MN = make_matrix(128, 256, 3)
    results = [
        (ScaledProducts(recipe).compute_output(x_MK, w_NK), recipe.output, x_MK, w_NK, "mk,nk->mn"),
        (
            ScaledProducts(recipe).compute_input_gradient(g_MN, w_NK),
            recipe.input_gradient,
            g_MN,
            w_NK,
            "mn,nk->mk",
        ),
        (
            ScaledProducts(recipe).compute_weight_gradient(g_MN, x_MK),
            recipe.weight_gradient,
            g_MN,
            x_MK,
            "mn,mk->nk",
        ),
    ]
    for result, scalings, left, right, equation in results:
        if scalings is not None:
            left, right = (
                round_in_loops(v, s) for v, s in zip((left, right), scalings, strict=True)
            )
        expected = torch.einsum(equation, left.double(), right.double())
        scale = torch.einsum(equation, left.double().abs(), right.double().abs())
        assert ((result.double() - expected).abs() <= 1e-5 * scale).all(), equation


def round_in_loops(values: Tensor, scaling: Scaling) -> Tensor:
    """Round a matrix as the formulas state, one block at a time, in fp64."""
    rows = scaling.rows or values.shape[0]
    columns = scaling.columns or values.shape[1]
    largest = torch.finfo(scaling.code_dtype).max
    rounded = torch.empty_like(values)
    for block, out in (
        (values[i : i + rows, j : j + columns], rounded[i : i + rows, j : j + columns])
        for i in range(0, values.shape[0], rows)
        for j in range(0, values.shape[1], columns)
    ):
        multiplier = largest / block.abs().max().item()
        if scaling.scale_format != "fp32":
            multiplier = 2.0 ** math.floor(math.log2(multiplier))
        multiplier = torch.tensor(multiplier, dtype=torch.float32)
        out.copy_((block * multiplier).clamp(-largest, largest).to(scaling.code_dtype).float())
        out.div_(multiplier)
    return rounded


def test_results_have_the_operands_dtype() -> None:
    x, w, g = (make_matrix(32, 32, seed).bfloat16() for seed in range(3))
    for recipe in RECIPES.values():
        assert ScaledProducts(recipe).compute_output(x, w).dtype == torch.bfloat16
        assert ScaledProducts(recipe).compute_input_gradient(g, w).dtype == torch.bfloat16
        assert ScaledProducts(recipe).compute_weight_gradient(g, x).dtype == torch.bfloat16
