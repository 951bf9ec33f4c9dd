"""Codes, scales and products equal those of torchao's reference on the same inputs.

`test_products_against_torchao` has blocks of 128, and whole products of the other recipes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwright.model.products import fp8
from shardwright.model.products.fp8 import E4M3, RECIPES
from shardwright.model.products.scaled_product import ScaledProducts
from tests.unit.model.test_fp8 import make_matrix

pytest.importorskip("torchao")

DTYPES = [torch.float32, torch.bfloat16]


def make_operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x_MK = make_matrix(128, 256, 1)
    w_NK = make_matrix(384, 256, 2)
    g_MN = make_matrix(128, 384, 3)
    x_MK[3] = 0.0
    return x_MK.to(dtype), w_NK.to(dtype), (g_MN * 1e-6).to(dtype)


def compute_three_products(
    x_MK: Tensor, w_NK: Tensor, g_MN: Tensor, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    recipe = RECIPES[name]
    return (
        ScaledProducts(recipe).compute_output(x_MK, w_NK),
        ScaledProducts(recipe).compute_input_gradient(g_MN, w_NK),
        ScaledProducts(recipe).compute_weight_gradient(g_MN, x_MK),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_products_are_those_of_float8_training(name: str, dtype: torch.dtype) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    x_MK, w_NK, g_MN = make_operands(dtype)
    layer = nn.Linear(256, 384, bias=False, dtype=dtype)
    layer.weight.data = w_NK
    config = replace(Float8LinearConfig.from_recipe_name(name), emulate=True)
    layer = convert_to_float8_training(nn.Sequential(layer), config=config)[0]
    x_leaf = x_MK.clone().requires_grad_()
    output = layer(x_leaf)
    output.backward(g_MN)
    reference = (output, x_leaf.grad, layer.weight.grad)
    for ours, expected in zip(
        compute_three_products(x_MK, w_NK, g_MN, name), reference, strict=True
    ):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_and_scales_are_those_of_mx_training(dtype: torch.dtype) -> None:
    """torchao quantises the rows of each operand, transposed if its columns are summed over."""
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    x_MK, w_NK, g_MN = make_operands(dtype)
    recipe = RECIPES["mxfp8"]
    assert recipe.weight_gradient is not None
    operands = [
        (x_MK, recipe.output[0], False),
        (w_NK, recipe.output[1], False),
        (g_MN, recipe.input_gradient[0], False),
        (w_NK, recipe.input_gradient[1], True),
        (g_MN, recipe.weight_gradient[0], True),
        (x_MK, recipe.weight_gradient[1], True),
    ]
    for values, scaling, is_summed_over_rows in operands:
        rows = values.t() if is_summed_over_rows else values
        scales, codes = to_mx(rows.contiguous(), E4M3, 32, ScaleCalculationMode.RCEIL)
        matrix = fp8.quantise(values, scaling)
        ours = [matrix.codes, matrix.multipliers]
        ours = [each.t() if is_summed_over_rows else each for each in ours]
        assert torch.equal(ours[0].contiguous().view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(1 / ours[1], scales.float())


def test_difference_beside_powers_of_two_is_torchaos_logarithm() -> None:
    """torchao's scale is twice ours where its fp32 logarithm rounds to a whole number."""
    from torchao.float8.float8_utils import amax_to_scale

    maximum = torch.nextafter(torch.tensor(448.0 * 2.0**20), torch.tensor(torch.inf))
    ours = fp8.quantise(maximum.view(1, 1), RECIPES["rowwise"].output[0]).multipliers.item()
    expected = amax_to_scale(maximum, E4M3, round_scales_to_power_of_2=True).item()
    assert (ours, expected) == (2.0**-21, 2.0**-20)
    assert ours * maximum.item() <= 448.0 < expected * maximum.item()
