"""Deferred weight gradients: products that run when the rank would otherwise wait.

Zero-bubble schedules split a backward pass into I (gradients of inputs, for the preceding
stage) and W (gradients of weights). Here I is an ordinary backward pass in which `Linear`
stores its input and its output's gradient; W multiplies them. W does not use autograd's graph,
so recomputation, FSDP2 and all other gradients work unchanged: those of norms, biases,
embeddings and experts, and that of the head, which the chunked loss computes in the forward
pass.

Legend: N tokens flat, I in, O out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DeferredProduct(NamedTuple):
    """Factors of a weight's gradient."""

    weight: nn.Parameter
    x_NI: Tensor
    gradient_NO: Tensor
    is_transposed: bool

    @torch.no_grad()  # the gradient would keep a recomputed input's graph alive
    def accumulate(self) -> None:
        """Multiply, and add the result to the weight's gradient."""
        left, right = (
            (self.x_NI, self.gradient_NO) if self.is_transposed else (self.gradient_NO, self.x_NI)
        )
        gradient = (left.t() @ right).to(self.weight.dtype)
        if self.weight.grad is None:
            self.weight.grad = gradient
        else:
            self.weight.grad += gradient


class WeightGradientStore:
    """Store of the products that `Linear` defers; outside `defer` it multiplies at once."""

    def __init__(self) -> None:
        self._products: list[DeferredProduct] | None = None

    @contextmanager
    def defer(self) -> Iterator[list[DeferredProduct]]:
        """Defer weight gradients of a backward pass in this context to the yielded list."""
        assert self._products is None, "one backward pass at a time"
        self._products = []
        try:
            yield self._products
        finally:
            self._products = None

    def apply_linear(
        self, x: Tensor, weight: nn.Parameter, bias: Tensor | None, *, is_transposed: bool
    ) -> Tensor:
        """Compute x @ weight (+ bias) in x's precision; `is_transposed` as in `Linear`."""
        y: Tensor = _DeferrableLinear.apply(
            x, weight.to(x.dtype), bias, _WeightReference(weight, is_transposed, self)
        )
        return y


class _WeightReference(NamedTuple):
    """Parameter and store; inside a tuple, autograd does not take them for inputs."""

    weight: nn.Parameter
    is_transposed: bool
    store: WeightGradientStore


class _DeferrableLinear(torch.autograd.Function):
    """F.linear whose weight gradient can be deferred to `WeightGradientStore`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, reference: _WeightReference
    ) -> Tensor:
        ctx.reference = reference
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.t() if reference.is_transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        reference: _WeightReference = ctx.reference
        gradient = gradients[0]
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        # Detached: `flatten` returns a matrix itself, and stored tensors must not keep
        # autograd's graph.
        x_NI = x.detach().flatten(0, -2)
        gradient_NO = gradient.detach().flatten(0, -2)
        x_gradient = (
            gradient @ (weight.t() if reference.is_transposed else weight) if needs_x else None
        )
        bias_gradient = gradient_NO.sum(0) if needs_bias else None
        weight_gradient = None
        if needs_weight:
            products = reference.store._products
            if products is not None:
                products.append(
                    DeferredProduct(reference.weight, x_NI, gradient_NO, reference.is_transposed)
                )
            else:
                left, right = (
                    (x_NI, gradient_NO) if reference.is_transposed else (gradient_NO, x_NI)
                )
                weight_gradient = left.t() @ right
        return x_gradient, weight_gradient, bias_gradient, None
