"""Products of activations with the weights of linear layers and experts.

All of them are computed here: outputs, gradients of inputs, and gradients of weights, at once or
deferred. A weight is a matrix in any floating-point dtype, or packed bytes (`nf4`) that are
dequantised in the forward and again in the backward pass.

Zero-bubble schedules split a backward pass into I (gradients of inputs, for the preceding
stage) and W (gradients of weights). Here I is an ordinary backward pass in which a linear product
stores its input and its output's gradient; W multiplies them. W does not use autograd's graph,
so recomputation, FSDP2 and all other gradients work unchanged: those of norms, biases,
embeddings and experts, and that of the head, which the chunked loss computes in the forward
pass.

Legend: N tokens flat, I in, O out, E experts, M rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.architecture.nf4_layout import count_columns
from shardwright.model import nf4
from shardwright.model.grouped_matmul import multiply_grouped


class ProductRule(NamedTuple):
    """Form of a layer's weight, and the store of its deferred gradients."""

    num_in: int
    """Inputs of the whole matrix. A shard of packed bytes has a part of them."""
    is_transposed: bool = False
    """True for matrices `[in, out]`, False for `[out, in]`."""
    store: WeightGradientStore | None = None
    """Store under a schedule with split backward passes."""


def multiply(x: Tensor, weight: nn.Parameter, bias: Tensor | None, rule: ProductRule) -> Tensor:
    """Compute x @ weight (+ bias) in x's precision, `[.., out]`."""
    if weight.dtype == torch.uint8:
        product: Tensor = _LinearProduct.apply(x, weight, None, rule, None)
        return product if bias is None else product + bias
    if rule.store is not None and torch.is_grad_enabled():
        reference = _WeightReference(weight)
        product = _LinearProduct.apply(x, weight.to(x.dtype), bias, rule, reference)
        return product
    matrix = weight.to(x.dtype)
    return F.linear(x, matrix.t() if rule.is_transposed else matrix, bias)


def multiply_by_expert(x_MI: Tensor, weight: Tensor, counts_E: Tensor, rule: ProductRule) -> Tensor:
    """Multiply each row by its expert's matrix in the row's precision, `[M, O]`.

    Rows are sorted by expert; `weight` has a leading dim of experts, and `counts_E` has their
    numbers of rows.
    """
    if weight.dtype == torch.uint8:
        product: Tensor = _PackedExpertProduct.apply(x_MI, weight, counts_E, rule)
        return product
    return multiply_grouped(
        x_MI, weight.to(x_MI.dtype), counts_E, transposed=not rule.is_transposed
    )


def compute_weight_gradient(gradient_NO: Tensor, x_NI: Tensor, rule: ProductRule) -> Tensor:
    """Compute the gradient of a linear layer's weight, in the weight's orientation."""
    left, right = (x_NI, gradient_NO) if rule.is_transposed else (gradient_NO, x_NI)
    return left.t() @ right


class DeferredProduct(NamedTuple):
    """Factors of a weight's gradient."""

    weight: nn.Parameter
    x_NI: Tensor
    gradient_NO: Tensor
    rule: ProductRule

    @torch.no_grad()  # the gradient would keep a recomputed input's graph alive
    def accumulate(self) -> None:
        """Multiply, and add the result to the weight's gradient."""
        product = compute_weight_gradient(self.gradient_NO, self.x_NI, self.rule)
        gradient = product.to(self.weight.dtype)
        if self.weight.grad is None:
            self.weight.grad = gradient
        else:
            self.weight.grad += gradient


class WeightGradientStore:
    """Store of deferred products; outside `defer` layers multiply at once."""

    def __init__(self) -> None:
        self.products: list[DeferredProduct] | None = None

    @contextmanager
    def defer(self) -> Iterator[list[DeferredProduct]]:
        """Defer weight gradients of a backward pass in this context to the yielded list."""
        assert self.products is None, "one backward pass at a time"
        self.products = []
        try:
            yield self.products
        finally:
            self.products = None


class _WeightReference(NamedTuple):
    """Parameter of a deferrable product; inside a tuple, autograd does not take it for an input."""

    weight: nn.Parameter


class _LinearProduct(torch.autograd.Function):
    """x @ weight (+ bias) that saves packed bytes as they are, and can defer weight gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rule: ProductRule,
        reference: _WeightReference | None,
    ) -> Tensor:
        ctx.rule = rule
        ctx.reference = reference
        # Packed weights are frozen; only their gradient would need x.
        ctx.save_for_backward(None if weight.dtype == torch.uint8 else x, weight)
        return F.linear(x, _read_matrix(weight, rule, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rule: ProductRule = ctx.rule
        gradient = gradients[0]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Detached: `flatten` returns a matrix itself, and stored tensors must not keep
        # autograd's graph.
        gradient_NO = gradient.detach().flatten(0, -2)
        x_gradient = gradient @ _read_matrix(weight, rule, gradient.dtype) if needs_x else None
        bias_gradient = gradient_NO.sum(0) if needs_bias else None
        weight_gradient = None
        if needs_weight:
            x_NI = x.detach().flatten(0, -2)
            products = None if rule.store is None else rule.store.products
            if products is not None:
                products.append(DeferredProduct(ctx.reference.weight, x_NI, gradient_NO, rule))
            else:
                weight_gradient = compute_weight_gradient(gradient_NO, x_NI, rule)
        return x_gradient, weight_gradient, bias_gradient, None, None


def _read_matrix(weight: Tensor, rule: ProductRule, dtype: torch.dtype) -> Tensor:
    """Return the matrix `[out, in]`: packed bytes are dequantised."""
    if weight.dtype == torch.uint8:
        return nf4.unpack(weight, count_columns(weight.shape[-1], rule.num_in), dtype)
    return weight.t() if rule.is_transposed else weight


class _PackedExpertProduct(torch.autograd.Function):
    """Grouped product that saves bytes and dequantises in the forward and the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x_MI: Tensor, packed_EOP: Tensor, counts_E: Tensor, rule: ProductRule
    ) -> Tensor:
        ctx.rule = rule
        ctx.save_for_backward(packed_EOP, counts_E)
        weight_EOI = _read_matrix(packed_EOP, rule, x_MI.dtype)
        return multiply_grouped(x_MI, weight_EOI, counts_E, transposed=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        packed_EOP, counts_E = ctx.saved_tensors
        gradient_MO = gradients[0].contiguous()
        weight_EOI = _read_matrix(packed_EOP, ctx.rule, gradient_MO.dtype)
        x_gradient = multiply_grouped(gradient_MO, weight_EOI, counts_E, transposed=False)
        return x_gradient, None, None, None
