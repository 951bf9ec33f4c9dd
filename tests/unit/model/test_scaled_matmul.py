"""torch's kernels for 8-bit operands: the emulation's numbers, and the layouts that CUDA takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwright.model.products.fp8 import RECIPES
from shardwright.model.products.scaled_product import ScaledProducts

KERNEL_RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
PRODUCTS = ["compute_output", "compute_input_gradient", "compute_weight_gradient"]


def make_operands() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (48, 64), "w": (32, 64), "g": (48, 32)}
    return {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }


def select_operands(product: str, operands: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    left, right = dict(zip(PRODUCTS, ("xw", "gw", "gx"), strict=True))[product]
    return operands[left], operands[right]


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", KERNEL_RECIPES)
def test_the_cpu_kernel_gives_the_emulations_numbers(name: str, product: str) -> None:
    pair = select_operands(product, make_operands())
    emulated = getattr(ScaledProducts(RECIPES[name]), product)(*pair)
    computed = getattr(ScaledProducts(RECIPES[name], is_emulated=False), product)(*pair)
    # One unit in the last place of bf16: the sums are rounded once, in another order.
    torch.testing.assert_close(computed, emulated, rtol=2.0**-7, atol=1e-6)
    assert (computed == emulated).float().mean() > 0.99


@pytest.mark.parametrize("sizes", [(128, 128, 128), (256, 384, 640)])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", RECIPES)
def test_operands_have_the_layout_of_the_cuda_kernels(
    name: str, product: str, sizes: tuple[int, int, int]
) -> None:
    """Meta tensors pass through the checks of shapes, strides and dtypes for CUDA."""
    tokens, inputs, outputs = sizes
    shapes = {"x": (tokens, inputs), "w": (outputs, inputs), "g": (tokens, outputs)}
    operands = {
        name: torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for name, shape in shapes.items()
    }
    pair = select_operands(product, operands)
    expected = getattr(ScaledProducts(RECIPES[name]), product)(*pair)
    out = getattr(ScaledProducts(RECIPES[name], is_emulated=False), product)(*pair)
    assert (out.shape, out.dtype) == (expected.shape, torch.bfloat16)


def test_the_cuda_checks_refuse_odd_widths() -> None:
    x = torch.empty(48, 40, device="meta")
    w = torch.empty(32, 40, device="meta")
    with pytest.raises(RuntimeError, match="divisible by 16"):
        ScaledProducts(RECIPES["rowwise"], is_emulated=False).compute_output(x, w)
