"""Linear layers and experts that multiply quantised operands: plain, deferred, adapted, packed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.architecture import AdapterShape, ExpertShape
from shardwright.model.moe import ExpertStack
from shardwright.model.products import fp8, nf4, nvfp4
from shardwright.model.products.fp8 import Scaling
from shardwright.model.products.linear import Linear
from shardwright.model.products.operand import PRODUCT_SCALINGS, Operand
from shardwright.model.products.product import ProductRule, WeightGradientStore, multiply_by_expert
from shardwright.model.products.scaled_product import RoundingTotals, ScaledProducts

ADAPTERS = AdapterShape(kind="lora", rank=4, alpha=8.0, modules=frozenset(), dropout=0.0)


def make_inputs(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Two rows of 33 tokens, so that tokens do not fill blocks of 32 or 128."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 33, 128, generator=generator) * torch.exp(
        2 * torch.randn(2, 33, 1, generator=generator)
    )
    return x.to(dtype).requires_grad_()


def build_linear(
    name: str | None,
    *,
    bias: bool = False,
    transposed: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Linear:
    layer = Linear(128, 256, bias=bias, transposed=transposed)
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02, generator=generator)
    layer.scaled = None if name is None else ScaledProducts(PRODUCT_SCALINGS[name])
    return layer.to(dtype)


def differentiate(layer: nn.Module, x: Tensor, loss_of: Tensor) -> dict[str, Tensor]:
    """Run a backward pass; return the gradients of x and of the parameters."""
    (loss_of.float() * make_inputs(seed=9).detach()[..., :1]).sum().backward()
    gradients = {"x": x.grad} | {name: each.grad for name, each in layer.named_parameters()}
    return {name: each for name, each in gradients.items() if each is not None}


@contextmanager
def record_operands() -> Iterator[list[tuple[Scaling, Tensor]]]:
    """Record the codes of every operand, as bytes."""
    recorded: list[tuple[Scaling, Tensor]] = []

    def build_recorder(quantise: Callable[..., Operand]) -> Callable[..., Operand]:
        def record(values: Tensor, scaling: Scaling, maxima: Tensor | None = None) -> Operand:
            matrix = quantise(values, scaling, maxima)
            recorded.append((scaling, matrix.codes.contiguous().view(torch.uint8)))
            return matrix

        return record

    with (
        mock.patch.object(fp8, "quantise", build_recorder(fp8.quantise)),
        mock.patch.object(nvfp4, "quantise", build_recorder(nvfp4.quantise)),
    ):
        yield recorded


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PRODUCT_SCALINGS)
def test_a_layer_computes_the_three_products_of_its_recipe(
    name: str, dtype: torch.dtype, transposed: bool
) -> None:
    layer = build_linear(name, bias=True, transposed=transposed)
    x = make_inputs(dtype)
    product = layer(x)
    product.retain_grad()
    gradients = differentiate(layer, x, product)
    g_MN = product.grad.flatten(0, 1)
    x_MK = x.detach().flatten(0, 1)
    matrix = layer.weight.detach().to(dtype)
    w_NK = matrix.t() if transposed else matrix
    recipe = PRODUCT_SCALINGS[name]
    expected = ScaledProducts(recipe).compute_output(x_MK, w_NK) + layer.bias.detach().to(dtype)
    assert product.dtype == dtype
    assert torch.equal(product.detach().flatten(0, 1), expected)
    assert torch.equal(
        gradients["x"].flatten(0, 1), ScaledProducts(recipe).compute_input_gradient(g_MN, w_NK)
    )
    weight_gradient = ScaledProducts(recipe).compute_weight_gradient(g_MN, x_MK, torch.float32)
    assert torch.equal(gradients["weight"], weight_gradient.t() if transposed else weight_gradient)


@pytest.mark.parametrize("name", PRODUCT_SCALINGS)
def test_gradients_are_near_those_in_high_precision(name: str) -> None:
    results = []
    for each in (name, None):
        layer = build_linear(each)
        x = make_inputs()
        results.append(differentiate(layer, x, layer(x)))
    for key, gradient in results[0].items():
        error = (gradient - results[1][key]).norm() / results[1][key].norm()
        is_exact = key == "weight" and PRODUCT_SCALINGS[name].weight_gradient is None
        limit = 0.2 if name == "nvfp4" else 0.1
        assert error == 0.0 if is_exact else 1e-4 < error < limit, key


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", PRODUCT_SCALINGS)
def test_deferred_and_recomputed_gradients_are_equal_bit_by_bit(
    name: str, transposed: bool
) -> None:
    plain = build_linear(name, transposed=transposed)
    x = make_inputs()
    expected = differentiate(plain, x, plain(x))
    for is_recomputed in (False, True):
        layer = copy.deepcopy(plain)
        layer.weight.grad = None
        layer.gradient_store = store = WeightGradientStore()
        x = make_inputs()
        with store.defer() as products:
            y = checkpoint(layer, x, use_reentrant=False) if is_recomputed else layer(x)
            gradients = differentiate(layer, x, y)
        assert set(gradients) == {"x"}
        with record_operands() as recorded:
            products[0].accumulate()
        assert [scaling for scaling, _ in recorded] == list(
            PRODUCT_SCALINGS[name].weight_gradient or ()
        )
        assert torch.equal(gradients["x"], expected["x"])
        assert torch.equal(layer.weight.grad, expected["weight"])
        assert layer.weight.grad.is_contiguous()


@pytest.mark.parametrize("is_packed", [False, True])
def test_adapters_keep_their_precision_over_a_base_of_8_bit_products(is_packed: bool) -> None:
    layer = build_linear("rowwise")
    layer.add_adapter(ADAPTERS, 0)
    for parameter in (layer.lora_A.weight, layer.lora_B.weight):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(3))
    matrix = layer.weight.detach()
    layer.weight.requires_grad_(False)
    if is_packed:
        packed = nf4.pack(matrix)
        matrix = nf4.unpack(packed, 128, torch.float32)
        layer.quantise()
        layer.weight.copy_(packed)
    x = make_inputs()
    x_MK = x.detach().flatten(0, 1)
    base = ScaledProducts(PRODUCT_SCALINGS["rowwise"]).compute_output(x_MK, matrix)
    update = x_MK @ layer.lora_A.weight.t() @ layer.lora_B.weight.t() * ADAPTERS.scale
    with record_operands() as recorded:
        product = layer(x)
    assert len(recorded) == 2
    torch.testing.assert_close(product.flatten(0, 1), base + update)
    gradients = differentiate(layer, x, product)
    assert set(gradients) == {"x", "lora_A.weight", "lora_B.weight"}


EXPERT_RECIPES = [name for name in PRODUCT_SCALINGS if name != "tensorwise"]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", EXPERT_RECIPES)
def test_experts_equal_one_layer_each(name: str, transposed: bool, is_packed: bool) -> None:
    if is_packed and transposed:
        pytest.skip("packed matrices are stored [out, in]")
    generator = torch.Generator().manual_seed(6)
    counts = torch.tensor([5, 0, 40])
    sides = (128, 128)
    weight = torch.randn(3, *sides, generator=generator)
    if is_packed:
        weight = nf4.pack(weight)
    else:
        weight.requires_grad_()
    x = torch.randn(45, 128, generator=generator, requires_grad=True)
    scaled = ScaledProducts(PRODUCT_SCALINGS[name])
    out = multiply_by_expert(x, weight, counts, ProductRule(128, transposed, scaled=scaled))
    out.square().sum().backward()
    for expert, rows in enumerate(torch.arange(45).split(counts.tolist())):
        layer = Linear(128, 128, bias=False, transposed=transposed)
        # Experts' weight gradients stay in high precision.
        layer.scaled = ScaledProducts(replace(PRODUCT_SCALINGS[name], weight_gradient=None))
        if is_packed:
            layer.quantise()
        layer.weight.data.copy_(weight[expert].detach())
        x_rows = x.detach()[rows].requires_grad_()
        layer_out = layer(x_rows)
        layer_out.square().sum().backward()
        torch.testing.assert_close(layer_out, out[rows], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(x_rows.grad, x.grad[rows], rtol=1e-5, atol=1e-3)
        if not is_packed:
            torch.testing.assert_close(layer.weight.grad, weight.grad[expert], rtol=1e-5, atol=1e-3)


def test_without_gradients_and_with_a_frozen_weight_nothing_else_is_saved() -> None:
    layer = build_linear("mxfp8")
    saved: list[Tensor] = []
    layer.weight.requires_grad_(False)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (saved.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        layer(make_inputs())
    assert [tuple(tensor.shape) for tensor in saved] == [(256, 128)]


def test_the_stack_of_experts_passes_its_scaling() -> None:
    experts = mock.Mock(spec=ExpertShape, num_experts=2, matrix_layout="out_in", expert_bias=False)
    stack = ExpertStack(experts, 32, 32)
    nn.init.normal_(stack.weight)
    stack.scaled = ScaledProducts(PRODUCT_SCALINGS["mxfp8"])
    with record_operands() as recorded:
        stack(torch.randn(4, 32), torch.tensor([1, 3]))
    assert len(recorded) == 2


def test_totals_count_flushed_elements_per_weight() -> None:
    totals = RoundingTotals(["a", "b"])
    layer = build_linear(None)
    layer.scaled = ScaledProducts(PRODUCT_SCALINGS["tensorwise"], name="b", totals=totals)
    x = make_inputs()
    layer(x)
    assert not totals.pop_table(x.device).any()
    totals.is_counting = True
    layer(x)
    table = totals.pop_table(x.device)
    weight = layer.weight.detach()
    flushed = sum(
        fp8.count_rounding(values, fp8.quantise(values, Scaling(None, None))).num_flushed
        for values in (x.detach().flatten(0, 1), weight)
    )
    assert flushed > 0
    assert table.tolist() == [[0] * 4, [0, int(flushed), 0, x.numel() + weight.numel()]]
    assert not totals.pop_table(x.device).any()
