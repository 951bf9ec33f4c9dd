"""Weight gradients put off: the product that a backward pass may leave for later, when its rank would otherwise wait.

Zero-bubble schedules cut a backward into I, which gives the stage before its gradient, and W. Here I is an ordinary backward pass
in which `Linear` keeps its input and its output's gradient instead of multiplying them, and W multiplies. W needs nothing of
autograd's graph, so recomputation, FSDP2 and the gradients of everything else (norms, biases, embeddings, experts, and the head,
whose gradient the chunked loss has made in the forward pass) work as they do without.

Legend: N tokens flat, I in, O out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Product(NamedTuple):
    """A weight's gradient, not yet multiplied."""

    weight: nn.Parameter
    x_NI: Tensor
    gradient_NO: Tensor
    transposed: bool

    @torch.no_grad()
    @torch.no_grad()
    def add(self) -> None:
        """Multiply, and add the result to the weight's gradient.

        Outside a backward pass autograd would watch: an input that was recomputed has a graph of its own, and the gradient would
        keep it alive.
        """
        one, other = (self.x_NI, self.gradient_NO) if self.transposed else (self.gradient_NO, self.x_NI)
        gradient = (one.t() @ other).to(self.weight.dtype)
        if self.weight.grad is None:
            self.weight.grad = gradient
        else:
            self.weight.grad += gradient


class WeightGradients:
    """Where `Linear` leaves its products, while `deferring`; otherwise it multiplies at once."""

    def __init__(self) -> None:
        self._products: list[Product] | None = None

    @contextmanager
    def deferring(self) -> Iterator[list[Product]]:
        """Bracket a backward pass; the list holds what it put off."""
        assert self._products is None, "one backward pass at a time"
        self._products = []
        try:
            yield self._products
        finally:
            self._products = None

    def linear(self, x: Tensor, weight: nn.Parameter, bias: Tensor | None, *, transposed: bool) -> Tensor:
        """x @ weight (+ bias) in x's precision; `transposed` as in `Linear`."""
        y: Tensor = _Linear.apply(x, weight.to(x.dtype), bias, _Owner(weight, transposed, self))
        return y


class _Owner(NamedTuple):
    """Beside the tensors: the parameter itself, which autograd would take for an input."""

    weight: nn.Parameter
    transposed: bool
    deferral: WeightGradients


class _Linear(torch.autograd.Function):
    """F.linear, whose weight's gradient may be left to `WeightGradients`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, owner: _Owner) -> Tensor:
        ctx.owner = owner
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.t() if owner.transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        owner: _Owner = ctx.owner
        gradient = gradients[0]
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        # Detached: of a matrix `flatten` gives itself, and what waits must not keep autograd's graph.
        x_NI, gradient_NO = x.detach().flatten(0, -2), gradient.detach().flatten(0, -2)
        x_gradient = gradient @ (weight.t() if owner.transposed else weight) if wants_x else None
        bias_gradient = gradient_NO.sum(0) if wants_bias else None
        weight_gradient = None
        if wants_weight:
            products = owner.deferral._products
            if products is not None:
                products.append(Product(owner.weight, x_NI, gradient_NO, owner.transposed))
            else:
                one, other = (x_NI, gradient_NO) if owner.transposed else (gradient_NO, x_NI)
                weight_gradient = one.t() @ other
        return x_gradient, weight_gradient, bias_gradient, None
