"""Linear layers and experts that multiply 8-bit operands: plain, deferred, adapted, packed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.architecture import AdapterShape, ExpertShape
from shardwright.model import fp8, nf4
from shardwright.model.fp8 import RECIPES, ProductScaling, Scaling
from shardwright.model.linear import Linear
from shardwright.model.moe import ExpertStack
from shardwright.model.product import ProductRule, WeightGradientStore, multiply_by_expert

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
    layer.scaling = None if name is None else RECIPES[name]
    return layer.to(dtype)


def differentiate(layer: nn.Module, x: Tensor, loss_of: Tensor) -> dict[str, Tensor]:
    """Run a backward pass; return the gradients of x and of the parameters."""
    (loss_of.float() * make_inputs(seed=9).detach()[..., :1]).sum().backward()
    gradients = {"x": x.grad} | {name: each.grad for name, each in layer.named_parameters()}
    return {name: each for name, each in gradients.items() if each is not None}


@contextmanager
def record_operands() -> Iterator[list[tuple[Scaling, Tensor]]]:
    """Record the codes of every operand, as bytes."""
    recorded = []
    quantise = fp8.quantise

    def record(
        values: Tensor, scaling: Scaling, maxima: Tensor | None = None
    ) -> fp8.QuantisedMatrix:
        matrix = quantise(values, scaling, maxima)
        recorded.append((scaling, matrix.codes.contiguous().view(torch.uint8)))
        return matrix

    with mock.patch.object(fp8, "quantise", record):
        yield recorded


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
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
    recipe = RECIPES[name]
    expected = fp8.compute_output(x_MK, w_NK, recipe) + layer.bias.detach().to(dtype)
    assert product.dtype == dtype
    assert torch.equal(product.detach().flatten(0, 1), expected)
    assert torch.equal(gradients["x"].flatten(0, 1), fp8.compute_input_gradient(g_MN, w_NK, recipe))
    weight_gradient = fp8.compute_weight_gradient(g_MN, x_MK, recipe).float()
    assert torch.equal(gradients["weight"], weight_gradient.t() if transposed else weight_gradient)


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_are_near_those_in_high_precision(name: str) -> None:
    results = []
    for each in (name, None):
        layer = build_linear(each)
        x = make_inputs()
        results.append(differentiate(layer, x, layer(x)))
    for key, gradient in results[0].items():
        error = (gradient - results[1][key]).norm() / results[1][key].norm()
        assert 1e-4 < error < 0.1, key


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", RECIPES)
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
        assert [scaling for scaling, _ in recorded] == list(RECIPES[name].weight_gradient or ())
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
    base = fp8.compute_output(x_MK, matrix, RECIPES["rowwise"])
    update = x_MK @ layer.lora_A.weight.t() @ layer.lora_B.weight.t() * ADAPTERS.scale
    with record_operands() as recorded:
        product = layer(x)
    assert len(recorded) == 2
    torch.testing.assert_close(product.flatten(0, 1), base + update)
    gradients = differentiate(layer, x, product)
    assert set(gradients) == {"x", "lora_A.weight", "lora_B.weight"}


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_experts_equal_one_layer_each(name: str, transposed: bool, is_packed: bool) -> None:
    if is_packed and transposed:
        pytest.skip("packed matrices are stored [out, in]")
    generator = torch.Generator().manual_seed(6)
    counts = torch.tensor([5, 0, 40])
    sides = (64, 128) if transposed else (128, 64)
    weight = torch.randn(3, *sides, generator=generator)
    if is_packed:
        weight = nf4.pack(weight)
    else:
        weight.requires_grad_()
    x = torch.randn(45, 64, generator=generator, requires_grad=True)
    rule = ProductRule(64, transposed, scaling=RECIPES[name])
    out = multiply_by_expert(x, weight, counts, rule)
    out.square().sum().backward()
    for expert, rows in enumerate(torch.arange(45).split(counts.tolist())):
        layer = Linear(64, 128, bias=False, transposed=transposed)
        layer.scaling = RECIPES[name]
        if is_packed:
            layer.quantise()
        layer.weight.data.copy_(weight[expert].detach())
        x_rows = x.detach()[rows].requires_grad_()
        layer_out = layer(x_rows)
        layer_out.square().sum().backward()
        assert torch.equal(layer_out, out[rows])
        assert torch.equal(x_rows.grad, x.grad[rows])
        if not is_packed:
            assert torch.equal(layer.weight.grad, weight.grad[expert])


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
    stack.scaling = RECIPES["mxfp8"]
    with record_operands() as recorded:
        stack(torch.randn(4, 32), torch.tensor([1, 3]))
    assert len(recorded) == 4


def test_scalings_of_the_recipes_are_hashable_constants() -> None:
    assert all(isinstance(hash(recipe), int) for recipe in RECIPES.values())
    assert isinstance(RECIPES["mxfp8"], ProductScaling)
