"""Backward graphs in two parts, compiled by Inductor: gradients of matrices can wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.model.products.product import WeightGradientStore
from shardwright.model.products.split_backward import SplitBackward


class Layer(nn.Module):
    """Norm, gate and two products, one of them with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16)

    def forward(self, x_ND: Tensor) -> Tensor:
        down: Tensor = self.down(F.silu(self.up(self.norm(x_ND))))
        return x_ND + down


def collect_gradients(
    layers: nn.ModuleList,
    functions: Sequence[Callable[[Tensor], Tensor]],
    x_ND: Tensor,
    store: WeightGradientStore | None = None,
) -> list[Tensor]:
    """Return the gradients of x and of all parameters; with a store, those of matrices wait."""
    layers.zero_grad()
    x_ND.grad = None
    y_ND = x_ND
    for function in functions:
        y_ND = function(y_ND)
    loss = y_ND.square().sum()
    if store is None:
        loss.backward()
    else:
        with store.defer() as waiting:
            loss.backward()
        names = [name for name, parameter in layers.named_parameters() if parameter.grad is None]
        assert names == ["0.up.weight", "0.down.weight", "1.up.weight", "1.down.weight"]
        for gradient in waiting:
            gradient.accumulate()
    gradients = [x_ND.grad, *(parameter.grad for parameter in layers.parameters())]
    return [gradient.clone() for gradient in gradients if gradient is not None]


@pytest.mark.long  # Inductor's C++ compiler takes half a minute
@pytest.mark.parametrize("dynamic", [None, True])
def test_gradients_of_matrices_wait_in_inductors_graphs(dynamic: bool | None) -> None:
    torch._dynamo.reset()
    layers = nn.ModuleList([Layer(), Layer()]).double()
    store = WeightGradientStore()
    backend = SplitBackward(store)
    compiled = [torch.compile(layer, backend=backend, dynamic=dynamic) for layer in layers]
    for num_tokens in (4, 6, 5):
        x_ND = torch.randn(num_tokens, 16, dtype=torch.float64, requires_grad=True)
        expected = collect_gradients(layers, list(layers), x_ND)
        assert len(expected) == 9
        for used_store in (None, store):
            got = collect_gradients(layers, compiled, x_ND, used_store)
            for gradient, want in zip(got, expected, strict=True):
                torch.testing.assert_close(gradient, want, rtol=1e-12, atol=1e-13)
