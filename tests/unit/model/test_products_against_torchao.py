"""Outputs and both gradients of whole products equal those of torchao's training functions.

`test_fp8_against_torchao` compares codes and scales, and whole products of the recipes that
torchao emulates on any device. Here torchao's training functions state which operand is quantised
in which product. Where they multiply by a kernel, the reference multiplies the dequantised
operands, as torchao's own emulation does.

Differences, each on purpose:

- torchao's emulation of experts multiplies bf16 operands. Codes times powers of two are exact in
  bf16; the scales of `blockwise` are not, so its experts are compared with torchao's function for
  one matrix, expert by expert.
- torchao quantises operands of experts' weight gradients by groups of tokens, or with
  `wgrad_with_hp` not at all, as here: tokens of an expert depend on the router.
- torchao has no CPU quantisation in blocks of 16 x 16 (`nvfp4`). In the weights here every row and
  every column of such a block has the block's maximum, so that blocks of 1 x 16 are the same.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._triton import has_triton_package

from shardwright.model.products import fp8, nvfp4
from shardwright.model.products.fp8 import E4M3, RECIPES, Scaling
from shardwright.model.products.scaled_product import ScaledProducts
from tests.unit.model.test_fp8 import make_matrix

pytest.importorskip("torchao")

DTYPES = [torch.float32, torch.bfloat16]
COUNTS = torch.tensor([64, 0, 32, 32])
"""Tokens of each expert."""


class Products(NamedTuple):
    output: Tensor
    input_gradient: Tensor
    weight_gradient: Tensor


def make_operands(dtype: torch.dtype, num_matrices: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Make x `[128, 256]`, w `[matrices x 384, 256]` and g `[128, 384]`."""
    x_MK = make_matrix(128, 256, 1)
    w_NK = make_matrix(num_matrices * 384, 256, 2)
    g_MN = make_matrix(128, 384, 3)
    x_MK[3] = 0.0
    return x_MK.to(dtype), w_NK.to(dtype), (g_MN * 1e-6).to(dtype)


def compute_products(products: ScaledProducts, x: Tensor, w: Tensor, g: Tensor) -> Products:
    return Products(
        products.compute_output(x, w),
        products.compute_input_gradient(g, w),
        products.compute_weight_gradient(g, x),
    )


def differentiate(
    function: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor, g: Tensor
) -> Products:
    """Compute a reference's output and its gradients for the gradient of the output."""
    x_leaf = x.clone().requires_grad_()
    w_leaf = w.clone().requires_grad_()
    output = function(x_leaf, w_leaf)
    output.backward(g)
    assert x_leaf.grad is not None
    assert w_leaf.grad is not None
    return Products(output.detach(), x_leaf.grad, w_leaf.grad)


def assert_equal_up_to_order_of_sums(
    found: Tensor, expected: Tensor, left: Tensor, right: Tensor
) -> None:
    """Compare two sums of the same numbers in fp32, rounded to the dtype of the result.

    Args:
        left: Left factor of the product before quantisation.
        right: Right factor.
    """
    magnitudes = left.double().abs() @ right.double().abs()
    rounding = 2 * torch.finfo(found.dtype).eps * expected.double().abs()
    limit = 1e-6 * magnitudes + (rounding if found.dtype == torch.bfloat16 else 0.0)
    assert ((found.double() - expected.double()).abs() <= limit).all()


def compare(found: Products, expected: Products, x: Tensor, w: Tensor, g: Tensor) -> None:
    assert_equal_up_to_order_of_sums(found.output, expected.output, x, w.t())
    assert_equal_up_to_order_of_sums(found.input_gradient, expected.input_gradient, g, w)
    assert_equal_up_to_order_of_sums(found.weight_gradient, expected.weight_gradient, g.t(), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_mxfp8_training(dtype: torch.dtype) -> None:
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats.config import (
        MXFP8Dim0CastKernelChoice,
        MXFP8Dim1CastKernelChoice,
        ScaleCalculationMode,
    )
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    x, w, g = make_operands(dtype)

    def multiply(x_MK: Tensor, w_NK: Tensor) -> Tensor:
        return mx_mm.apply(
            x_MK, w_NK, E4M3, E4M3, E4M3, 32,
            KernelPreference.EMULATED,
            MXFP8Dim0CastKernelChoice.TORCH,
            MXFP8Dim1CastKernelChoice.TORCH,
            ScaleCalculationMode.RCEIL,
            False,
        )  # fmt: skip

    expected = differentiate(multiply, x, w, g)
    compare(compute_products(ScaledProducts(RECIPES["mxfp8"]), x, w, g), expected, x, w, g)


class _TritonStub(ModuleType):
    """Module whose every decorator returns the decorated function."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **_: (
            args[0] if args and callable(args[0]) else lambda function: function
        )


@pytest.fixture(scope="module")
def blockwise_modules() -> tuple[ModuleType, ModuleType]:
    """Import torchao's modules `kernels` and `linear` of blocks of 128.

    They import triton for kernels that are not called here. A stub takes its place meanwhile.
    """
    has_triton_package()  # caches what is installed
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("triton") is None:
            stub = _TritonStub("triton")
            stub.language = _TritonStub("triton.language")
            patch.setitem(sys.modules, "triton", stub)
            patch.setitem(sys.modules, "triton.language", stub.language)
        from torchao.prototype.blockwise_fp8_training import kernels, linear
    return kernels, linear


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_and_scales_are_those_of_blockwise_training(
    blockwise_modules: tuple[ModuleType, ModuleType], dtype: torch.dtype
) -> None:
    kernels, _ = blockwise_modules
    x_MK, w_NK, _ = make_operands(dtype)
    cases = [
        (kernels.torch_blockwise_scale_act_quant_lhs, x_MK, Scaling(1, 128)),
        (kernels.torch_blockwise_scale_act_quant_rhs, x_MK, Scaling(128, 1)),
        (kernels.torch_blockwise_scale_weight_quant, w_NK, Scaling(128, 128)),
    ]
    for quantise, values, scaling in cases:
        codes, scales = quantise(values)
        matrix = fp8.quantise(values, scaling)
        assert torch.equal(matrix.codes.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(1 / matrix.multipliers, scales)


@pytest.fixture
def blockwise_product(
    blockwise_modules: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return torchao's differentiable product in blocks of 128, by its functions in plain torch."""
    kernels, linear = blockwise_modules

    def quantise_right(x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        return kernels.torch_blockwise_scale_act_quant_rhs(x.contiguous(), block_size)

    def quantise_transposed_left(x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        return kernels.torch_blockwise_scale_act_quant_lhs(x.t().contiguous(), block_size)

    def quantise_transposed_weight(w: Tensor, *, block_size: int) -> tuple[Tensor, Tensor]:
        codes, scales = kernels.torch_blockwise_scale_weight_quant(w, block_size)
        return codes.t(), scales.t()

    def quantise_weight(w: Tensor, *, block_size: int) -> tuple[Tensor, Tensor]:
        return kernels.torch_blockwise_scale_weight_quant(w, block_size)

    def multiply(**options: Any) -> Tensor:
        left = expand(options["mat_a"], options["scale_a"])
        scale_b = options["triton_scale_b"] if "triton_scale_b" in options else options["scale_b"]
        return (left @ expand(options["mat_b"], scale_b)).to(options["out_dtype"])

    for name, function in (
        ("triton_fp8_blockwise_act_quant_lhs", kernels.torch_blockwise_scale_act_quant_lhs),
        ("triton_fp8_blockwise_act_quant_rhs", quantise_right),
        ("triton_fp8_blockwise_act_quant_transposed_lhs", quantise_transposed_left),
        ("triton_fp8_blockwise_weight_quant_rhs", quantise_weight),
        ("triton_fp8_blockwise_weight_quant_transposed_rhs", quantise_transposed_weight),
        ("_run_blockwise_mm", multiply),
    ):
        monkeypatch.setattr(linear, name, function)
    return lambda x, w: linear.fp8_blockwise_mm.apply(x, w, 128, x.dtype, True)


def expand(codes: Tensor, scales: Tensor) -> Tensor:
    """Multiply codes by the scales of their blocks, which divide both dims evenly; fp32."""
    for dim in (0, 1):
        scales = scales.repeat_interleave(codes.shape[dim] // scales.shape[dim], dim)
    return codes.float() * scales


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_blockwise_training(
    blockwise_product: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> None:
    x, w, g = make_operands(dtype)
    expected = differentiate(blockwise_product, x, w, g)
    compare(compute_products(ScaledProducts(RECIPES["blockwise"]), x, w, g), expected, x, w, g)


def give_blocks_one_maximum(w_NK: Tensor) -> Tensor:
    """Set the diagonal of each block of 16 x 16 to the block's maximum."""
    blocks = w_NK.clone().unflatten(1, (-1, 16)).unflatten(0, (-1, 16)).transpose(1, 2)
    maxima = blocks.abs().amax((2, 3))
    places = torch.arange(16)
    blocks[:, :, places, places] = maxima[..., None]
    return blocks.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def round_as_nvfp4(values: Tensor, outer_scales: Tensor) -> Tensor:
    """Quantise blocks of 1 x 16 by torchao, and return the values of the codes in fp32."""
    from torchao.prototype.moe_training.nvfp4_grouped_mm import _nvfp4_dequantize
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    scales, codes = nvfp4_quantize(values.contiguous(), per_tensor_scale=outer_scales)
    return _nvfp4_dequantize(
        codes, scales, per_tensor_scale=outer_scales[..., None], output_dtype=torch.float32
    )


def round_rows_as_nvfp4(values: Tensor) -> Tensor:
    """Round with outer scales of rows, which are ours: torchao's are those of tensors."""
    return round_as_nvfp4(values, nvfp4.quantise(values, nvfp4.RECIPE.output[0]).outer_scales)


def round_weight_as_nvfp4(w_NK: Tensor) -> Tensor:
    from torchao.prototype.mx_formats.nvfp4_tensor import per_tensor_amax_to_scale

    return round_as_nvfp4(w_NK, per_tensor_amax_to_scale(w_NK.abs().max()).view(1, 1))


def compute_nvfp4_products(x: Tensor, w: Tensor, g: Tensor) -> Products:
    """Compute the reference; weight gradients are not quantised."""
    return Products(
        (round_rows_as_nvfp4(x) @ round_weight_as_nvfp4(w).t()).to(x.dtype),
        (round_rows_as_nvfp4(g) @ round_weight_as_nvfp4(w.t()).t()).to(x.dtype),
        g.t() @ x,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_nvfp4_operands(dtype: torch.dtype) -> None:
    x, w, g = make_operands(dtype)
    w = give_blocks_one_maximum(w)
    expected = compute_nvfp4_products(x, w, g)
    compare(compute_products(ScaledProducts(nvfp4.RECIPE), x, w, g), expected, x, w, g)


def compute_expert_products(
    products: ScaledProducts, x: Tensor, w_ENK: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    return (
        products.compute_expert_output(x, w_ENK, COUNTS),
        products.compute_expert_input_gradient(g, w_ENK, COUNTS),
    )


def compare_experts(
    found: tuple[Tensor, Tensor],
    expected: tuple[Tensor, Tensor],
    x: Tensor,
    w_ENK: Tensor,
    g: Tensor,
) -> None:
    rows = torch.arange(len(x)).split(COUNTS.tolist())
    for rows_M, w_NK in zip(rows, w_ENK, strict=True):
        outputs = (each[0][rows_M] for each in (found, expected))
        assert_equal_up_to_order_of_sums(*outputs, x[rows_M], w_NK.t())
        gradients = (each[1][rows_M] for each in (found, expected))
        assert_equal_up_to_order_of_sums(*gradients, g[rows_M], w_NK)


def test_products_of_experts_are_those_of_mxfp8_training() -> None:
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    x, w, g = make_operands(torch.bfloat16, len(COUNTS))
    w_ENK = w.unflatten(0, (len(COUNTS), -1))

    def multiply(x_MK: Tensor, weight_ENK: Tensor) -> Tensor:
        return _to_mxfp8_then_scaled_grouped_mm(
            x_MK,
            weight_ENK.transpose(1, 2),
            COUNTS.cumsum(0).int(),
            kernel_preference=KernelPreference.EMULATED,
            wgrad_with_hp=True,
        )

    expected = differentiate(multiply, x, w_ENK, g)
    found = compute_expert_products(ScaledProducts(RECIPES["mxfp8"]), x, w_ENK, g)
    compare_experts(found, expected[:2], x, w_ENK, g)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_experts_are_those_of_rowwise_training(dtype: torch.dtype) -> None:
    """torchao's quantisation of experts, in plain torch; its products are kernels on CUDA."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
    from torchao.prototype.moe_training.utils import torch_to_3d_rowwise_float8_transpose_rhs

    x, w, g = make_operands(dtype, len(COUNTS))
    w_ENK = w.unflatten(0, (len(COUNTS), -1))

    def round_along_last_dim(values: Tensor) -> Tensor:
        multipliers = tensor_to_scale(
            values,
            E4M3,
            scaling_granularity=ScalingGranularity.AXISWISE,
            axiswise_dim=-1,
            round_scales_to_power_of_2=True,
        )
        return to_fp8_saturated(values.float() * multipliers, E4M3).float() / multipliers

    codes_ENK, multipliers = torch_to_3d_rowwise_float8_transpose_rhs(
        w_ENK.transpose(1, 2), E4M3, round_scales_to_power_of_2=True
    )
    weights = round_along_last_dim(w_ENK), codes_ENK.float() / multipliers
    parts = [each.split(COUNTS.tolist()) for each in map(round_along_last_dim, (x, g))]
    expected = (
        torch.cat([rows @ w_NK.t() for rows, w_NK in zip(parts[0], weights[0], strict=True)]),
        torch.cat([rows @ w_NK for rows, w_NK in zip(parts[1], weights[1], strict=True)]),
    )
    found = compute_expert_products(ScaledProducts(RECIPES["rowwise"]), x, w_ENK, g)
    compare_experts(found, (expected[0].to(dtype), expected[1].to(dtype)), x, w_ENK, g)


@pytest.mark.parametrize("recipe", ["blockwise", "nvfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_experts_are_those_of_each_matrix(
    blockwise_product: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, recipe: str
) -> None:
    x, w, g = make_operands(dtype, len(COUNTS))
    if recipe == "nvfp4":
        w = give_blocks_one_maximum(w)
    w_ENK = w.unflatten(0, (len(COUNTS), -1))
    expected = []
    for x_MK, w_NK, g_MN in zip(
        x.split(COUNTS.tolist()), w_ENK, g.split(COUNTS.tolist()), strict=True
    ):
        if not len(x_MK):
            continue
        if recipe == "nvfp4":
            expected.append(compute_nvfp4_products(x_MK, w_NK, g_MN))
        else:  # blocks of 1 x 128 of tokens; those of weight gradients would need 128 tokens
            expected.append(multiply_rows(blockwise_product, x_MK, w_NK, g_MN))
    scaling = nvfp4.RECIPE if recipe == "nvfp4" else RECIPES[recipe]
    found = compute_expert_products(ScaledProducts(scaling), x, w_ENK, g)
    output = torch.cat([each.output for each in expected])
    gradient = torch.cat([each.input_gradient for each in expected])
    compare_experts(found, (output, gradient), x, w_ENK, g)


def multiply_rows(
    multiply: Callable[[Tensor, Tensor], Tensor], x_MK: Tensor, w_NK: Tensor, g_MN: Tensor
) -> Products:
    """Multiply rows that are no whole block of 128 tokens, with zeros below them."""
    num_rows = len(x_MK)
    below = (0, 0, 0, 128 - num_rows)
    padded = [torch.nn.functional.pad(each, below) for each in (x_MK, g_MN)]
    products = differentiate(multiply, padded[0], w_NK, padded[1])
    return Products(
        products.output[:num_rows], products.input_gradient[:num_rows], products.weight_gradient
    )
