"""A weight's gradient that waits is the one that does not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright.model.linear import Linear
from shardwright.model.weight_gradient_store import WeightGradientStore


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
def test_deferred_gradients_are_the_gradients(
    transposed: bool, recompute: bool, dtype: torch.dtype, rows: tuple[int, ...]
) -> None:
    plain = build(transposed, bias=True)
    split = copy.deepcopy(plain)
    store = WeightGradientStore()
    for module in split.modules():
        if isinstance(module, Linear):
            module.gradient_store = store
    waiting = []
    for number in range(3):
        x = torch.randn(*rows, 5, generator=torch.Generator().manual_seed(number)).to(dtype)
        one = x.clone().requires_grad_()
        other = x.clone().requires_grad_()
        plain(one).square().sum().backward()
        y = checkpoint(split, other, use_reentrant=False) if recompute else split(other)
        with store.defer() as products:
            y.square().sum().backward()
        assert len(products) == 2
        assert not any(product.x_NI.requires_grad or product.x_NI.grad_fn for product in products)
        assert torch.equal(one.grad, other.grad)
        waiting.append(products)
    assert split[0].weight.grad is None
    for products in waiting:
        for product in products:
            product.accumulate()
    for (name, wanted), (_, got) in zip(
        plain.named_parameters(), split.named_parameters(), strict=True
    ):
        torch.testing.assert_close(got.grad, wanted.grad, msg=name)
        assert not got.grad.requires_grad


def test_outside_the_bracket_nothing_waits_and_frozen_weights_get_nothing() -> None:
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
