"""Products of linear layers and experts: bits of plain torch, and deferred weight gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.model.products.linear import Linear
from shardwright.model.products.product import (
    ProductRule,
    WeightGradientStore,
    accumulate_gradient,
    multiply,
)


def build(transposed: bool, bias: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        Linear(5, 7, bias=bias, transposed=transposed),
        nn.SiLU(),
        Linear(7, 3, bias=bias, transposed=transposed),
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(2, 4), (8,)])
def test_deferred_gradients_equal_plain_gradients(
    transposed: bool, recompute: bool, dtype: torch.dtype, rows: tuple[int, ...]
) -> None:
    plain = build(transposed, bias=True)
    split = copy.deepcopy(plain)
    store = WeightGradientStore()
    for module in split.modules():
        if isinstance(module, Linear):
            module.gradient_store = store
    deferred = []
    for number in range(3):
        x = torch.randn(*rows, 5, generator=torch.Generator().manual_seed(number)).to(dtype)
        plain_x = x.clone().requires_grad_()
        split_x = x.clone().requires_grad_()
        plain(plain_x).square().sum().backward()
        y = checkpoint(split, split_x, use_reentrant=False) if recompute else split(split_x)
        with store.defer() as products:
            y.square().sum().backward()
        assert len(products) == 2
        inputs = [tensor for product in products for tensor in product.inputs]
        assert not any(tensor.requires_grad or tensor.grad_fn for tensor in inputs)
        assert torch.equal(plain_x.grad, split_x.grad)
        deferred.append(products)
    assert split[0].weight.grad is None
    for products in deferred:
        for product in products:
            product.accumulate()
    for (name, expected), (_, parameter) in zip(
        plain.named_parameters(), split.named_parameters(), strict=True
    ):
        torch.testing.assert_close(parameter.grad, expected.grad, msg=name)
        assert not parameter.grad.requires_grad


def test_gradients_are_deferred_only_inside_defer_and_not_for_frozen_weights() -> None:
    model = build(False, bias=False)
    store = WeightGradientStore()
    model[2].weight.requires_grad_(False)
    for module in (model[0], model[2]):
        module.gradient_store = store
    model(torch.ones(2, 5)).sum().backward()
    assert model[0].weight.grad is not None
    with store.defer() as products:
        model(torch.ones(2, 5)).sum().backward()
    assert [product.weight for product in products] == [model[0].weight]


@pytest.mark.parametrize("mode", ["no store", "at once", "deferred"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_are_those_of_plain_torch(
    dtype: torch.dtype, transposed: bool, has_bias: bool, mode: str
) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = nn.Parameter(torch.randn((24, 40) if transposed else (40, 24), generator=generator))
    bias = nn.Parameter(torch.randn(40, generator=generator)) if has_bias else None
    x = torch.randn(3, 7, 24, generator=generator).to(dtype).requires_grad_()
    matrix = weight.to(dtype)
    plain = F.linear(
        x, matrix.t() if transposed else matrix, None if bias is None else bias.to(dtype)
    )
    expected = differentiate(plain, x, weight, bias)
    store = None if mode == "no store" else WeightGradientStore()
    rule = ProductRule(24, transposed, store)
    product = multiply(x, weight, None if bias is None else bias.to(dtype), rule)
    assert torch.equal(product, plain)
    if store is None or mode == "at once":
        gradients = differentiate(product, x, weight, bias)
    else:
        with store.defer() as products:
            product.square().sum().backward()
        assert weight.grad is None
        products[0].accumulate()
        gradients = [each.grad for each in (x, weight, bias) if each is not None]
    for gradient, plain_gradient in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, plain_gradient)


def differentiate(product: Tensor, *inputs: Tensor | None) -> list[Tensor]:
    inputs = tuple(each for each in inputs if each is not None)
    return list(torch.autograd.grad(product.square().sum(), inputs))


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="torch has no grad_dtype")
def test_gradients_of_16_bit_weights_are_summed_in_the_dtype_that_fsdp2_sets() -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    for value in (1.0, 2.0**-10):
        accumulate_gradient(weight, torch.tensor([value]))
    assert weight.grad is not None
    assert weight.grad.item() == 1 + 2**-10  # more digits than bf16 has
