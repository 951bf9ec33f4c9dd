"""Products of activations with the weights of linear layers and experts.

All of them are computed here: outputs, gradients of inputs, and gradients of weights, at once or
deferred. A weight is a matrix in any floating-point dtype, or packed bytes (`nf4`) that are
dequantised in the forward and again in the backward pass. The operands have the precision of x,
or 8 or 4 bits (`scaled_product`).

Zero-bubble schedules split a backward pass into I (gradients of inputs, for the preceding
stage) and W (gradients of weights). Here I is an ordinary backward pass in which a linear product
stores its input and its output's gradient; W multiplies them. W does not use autograd's graph,
so recomputation, FSDP2 and all other gradients work unchanged: those of norms, biases,
embeddings and experts, and that of the head, which the chunked loss computes in the forward
pass.

Legend: N tokens flat, I in, O out, E experts, M rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.architecture.nf4_layout import count_columns
from shardwright.model.products import nf4
from shardwright.model.products.grouped_matmul import (
    compute_grouped_weight_gradient,
    multiply_grouped,
)
from shardwright.model.products.scaled_product import ScaledProducts
from shardwright.model.products.wide_product import has_wide_results, multiply_to
from shardwright.model.products.working_weights import read_weight


class ProductRule(NamedTuple):
    """Form of a layer's weight, precision of its products, and store of deferred gradients."""

    num_in: int
    """Inputs of the whole matrix. A shard of packed bytes has a part of them."""
    is_transposed: bool = False
    """True for matrices `[in, out]`, False for `[out, in]`."""
    store: WeightGradientStore | None = None
    """Store under a schedule with split backward passes."""
    scaled: ScaledProducts | None = None
    """Products of quantised operands; None multiplies in x's precision."""


def multiply(
    x: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    rule: ProductRule,
    working: Tensor | None = None,
) -> Tensor:
    """Compute x @ weight (+ bias), `[.., out]`, in x's dtype.

    Args:
        working: Working weight (`working_weights`); None casts the weight.
    """
    is_packed = weight.dtype == torch.uint8
    is_scaled = rule.scaled is not None
    is_deferrable = rule.store is not None and not is_packed and torch.is_grad_enabled()
    is_wide = (
        weight.dtype == torch.float32
        and weight.requires_grad
        and torch.is_grad_enabled()
        and has_wide_results(x)
    )
    if not (is_packed or is_scaled or is_deferrable or is_wide):
        matrix = read_weight(weight, working, x.dtype)
        return F.linear(x, matrix.t() if rule.is_transposed else matrix, bias)
    operand = None
    if not is_packed and weight.dtype != x.dtype and not _has_operands(rule, x):
        # Detached: the product's own gradient has the parameter's dtype.
        operand = read_weight(weight.detach(), working, x.dtype)
    reference = _WeightReference(weight) if is_deferrable else None
    if is_packed or is_scaled:
        product: Tensor = _LinearProduct.apply(x, weight, operand, None, rule, reference)
        return product if bias is None else product + bias
    product = _LinearProduct.apply(x, weight, operand, bias, rule, reference)
    return product


def multiply_by_expert(
    x_MI: Tensor,
    weight: Tensor,
    counts_E: Tensor,
    rule: ProductRule,
    working: Tensor | None = None,
) -> Tensor:
    """Multiply each row by its expert's matrix, `[M, O]`, in the rows' dtype.

    Rows are sorted by expert; `weight` has a leading dim of experts, and `counts_E` has their
    numbers of rows. `working` is the working weight; None casts the weight.
    """
    is_packed = weight.dtype == torch.uint8
    if is_packed or rule.scaled is not None:
        is_read = is_packed or _has_operands(rule, x_MI)
        operand = weight if is_read else read_weight(weight, working, x_MI.dtype)
        product: Tensor = _ExpertProduct.apply(x_MI, operand, counts_E, rule)
        return product
    operand = read_weight(weight, working, x_MI.dtype)
    return multiply_grouped(x_MI, operand, counts_E, transposed=not rule.is_transposed)


def _has_operands(rule: ProductRule, x: Tensor) -> bool:
    """Return True if products with x read operands that exist already, in place of the weight."""
    return rule.scaled is not None and rule.scaled.has_operands(x.dtype)


def compute_weight_gradient(
    gradient_NO: Tensor, x_NI: Tensor, rule: ProductRule, dtype: torch.dtype
) -> Tensor:
    """Compute the gradient of a linear layer's weight, in the weight's orientation and `dtype`."""
    if rule.scaled is not None:
        product_OI = rule.scaled.compute_weight_gradient(gradient_NO, x_NI, dtype)
        return product_OI.t().contiguous() if rule.is_transposed else product_OI
    left, right = (x_NI, gradient_NO) if rule.is_transposed else (gradient_NO, x_NI)
    return multiply_to(left.t(), right, dtype)


class LayerReference(NamedTuple):
    """Data of a layer that its weight gradient needs; holds no copy of the weight."""

    rule: ProductRule
    weight: nn.Parameter


class Operands(NamedTuple):
    """Operands of a layer's product other than its input, in the input's precision."""

    matrix: Tensor
    """Weight, in its own orientation. Its gradient is the parameter's."""
    bias: Tensor | None
    layer: LayerReference


class DeferredProduct(NamedTuple):
    """Factors of a weight's gradient."""

    weight: nn.Parameter
    inputs: list[Any]
    """The layer's input `[N, I]`, and the gradient of its output `[N, O]`."""
    rule: ProductRule

    @torch.no_grad()  # the gradient would keep a recomputed input's graph alive
    def accumulate(self) -> None:
        """Multiply, and add the result to the weight's gradient."""
        x_NI, gradient_NO = self.inputs
        gradient = compute_weight_gradient(gradient_NO, x_NI, self.rule, self.weight.dtype)
        accumulate_gradient(self.weight, gradient)


def accumulate_gradient(weight: nn.Parameter, gradient: Tensor) -> None:
    """Add to the weight's gradient, rounded to the weight's dtype."""
    gradient = gradient.to(weight.dtype)
    if weight.grad is None:
        # FSDP2 of torch 2.15 sums gradients of 16-bit weights in fp32, in the weight's own `grad`.
        weight.grad = gradient.to(getattr(weight, "grad_dtype", None) or weight.dtype)
    else:
        weight.grad += gradient


class DeferredGradient(Protocol):
    """Computation of weight gradients that waits for its turn."""

    @property
    def inputs(self) -> list[Any]:
        """Tensors and sizes that it reads besides parameters."""

    def accumulate(self) -> None:
        """Compute, and add the result to the weights' gradients."""


class PackedInput(Protocol):
    """Reference to an input of a deferred gradient."""

    def unpack(self) -> Tensor:
        """Return the tensor on the device."""


class InputOffload(Protocol):
    """Moves inputs of deferred gradients to a slower tier until they are read."""

    def pack_input(self, tensor: Tensor) -> PackedInput:
        """Return a reference through which the tensor's memory can leave the device."""

    def end_inputs(self) -> None:
        """End a backward pass: its inputs are complete."""

    def expect_input(self, packed: PackedInput) -> None:
        """Let an input return before a pass that reads it begins."""


class BlockBoundary(NamedTuple):
    """First item of a block's deferred gradients: calls a function before they are computed."""

    layer: int
    begin: Callable[[int], None]
    inputs: list[Any]
    """Empty."""

    def accumulate(self) -> None:
        """Call the function with the block's layer."""
        self.begin(self.layer)


class WeightGradientStore:
    """Store of deferred weight gradients; outside `defer` they are computed at once."""

    def __init__(self) -> None:
        self.products: list[DeferredGradient] | None = None
        self.offload: InputOffload | None = None
        """None leaves the inputs of deferred gradients on the device."""
        self._begin_block: Callable[[int], None] | None = None
        self._layer: int | None = None
        """Layer of the block whose gradients are deferred, if blocks are watched."""

    def watch_blocks(self, blocks: Mapping[int, nn.Module], begin: Callable[[int], None]) -> None:
        """Call a function with a block's layer before deferred gradients of its weights are
        computed; also for blocks that have deferred none.

        Args:
            blocks: by layer.
        """
        self._begin_block = begin
        for layer, block in blocks.items():
            block.register_forward_hook(partial(self._watch_backward, layer))

    def _watch_backward(
        self, layer: int, _block: nn.Module, _arguments: Any, output: Tensor
    ) -> None:
        if output.requires_grad:
            output.register_hook(lambda _gradient: self._enter_block(layer))

    def _enter_block(self, layer: int | None) -> None:
        """End the last block's deferred gradients; those that follow are of another block."""
        if self.products is None:
            return
        if self._layer is not None:
            assert self._begin_block is not None
            # `accumulate` goes from the end to the beginning.
            self.products.append(BlockBoundary(self._layer, self._begin_block, []))
        self._layer = layer

    @contextmanager
    def defer(self) -> Iterator[list[DeferredGradient]]:
        """Defer weight gradients of a backward pass in this context to the yielded list."""
        assert self.products is None, "one backward pass at a time"
        self.products = []
        try:
            yield self.products
        finally:
            self._enter_block(None)
            self.products = None
            if self.offload is not None:
                self.offload.end_inputs()

    def add(self, gradient: DeferredGradient) -> None:
        """Defer a gradient; its list of inputs becomes the store's."""
        assert self.products is not None, "only in `defer`"
        if self.offload is not None:
            gradient.inputs[:] = [
                self.offload.pack_input(value) if isinstance(value, Tensor) else value
                for value in gradient.inputs
            ]
        self.products.append(gradient)

    def expect(self, products: Sequence[DeferredGradient]) -> None:
        """Let the inputs that `accumulate` reads first return at the end of the pass before it."""
        if self.offload is None:
            return
        inputs = next((each.inputs for each in reversed(products) if each.inputs), ())
        for value in inputs:
            if hasattr(value, "unpack"):
                self.offload.expect_input(value)

    def accumulate(self, products: list[DeferredGradient]) -> None:
        """Compute deferred gradients and empty the list.

        Those deferred last come first: their inputs are the last ones to leave the device.
        """
        while products:
            gradient = products.pop()
            gradient.inputs[:] = [
                value.unpack() if hasattr(value, "unpack") else value for value in gradient.inputs
            ]
            gradient.accumulate()


class _WeightReference(NamedTuple):
    """Parameter of a product; inside a tuple, autograd does not take it for an input."""

    weight: nn.Parameter


class _LinearProduct(torch.autograd.Function):
    """Product that saves packed bytes as they are, scales operands, defers weight gradients, and
    computes these in the weight's dtype. `operand` is a cast of the weight to the precision of x,
    None if it needs none."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        operand: Tensor | None,
        bias: Tensor | None,
        rule: ProductRule,
        reference: _WeightReference | None,
    ) -> Tensor:
        ctx.rule = rule
        ctx.reference = reference
        ctx.weight_dtype = weight.dtype
        operand = weight if operand is None else operand
        # Only the weight's gradient needs x.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, operand)
        matrix_OI = _read_matrix(operand, rule, x.dtype)
        if rule.scaled is None:
            return F.linear(x, matrix_OI, bias)
        product_NO = rule.scaled.compute_output(x.flatten(0, -2), matrix_OI)
        return product_NO.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, operand = ctx.saved_tensors
        rule: ProductRule = ctx.rule
        gradient = gradients[0]
        needs_x, needs_weight, _, needs_bias = ctx.needs_input_grad[:4]
        # Detached: `flatten` returns a matrix itself, and stored tensors must not keep
        # autograd's graph.
        gradient_NO = gradient.detach().flatten(0, -2)
        x_gradient = None
        if needs_x:
            matrix_OI = _read_matrix(operand, rule, gradient.dtype)
            if rule.scaled is None:
                x_gradient = gradient @ matrix_OI
            else:
                x_gradient = rule.scaled.compute_input_gradient(gradient_NO, matrix_OI)
                x_gradient = x_gradient.unflatten(0, gradient.shape[:-1])
        bias_gradient = gradient_NO.sum(0) if needs_bias else None
        weight_gradient = None
        if needs_weight:
            x_NI = x.detach().flatten(0, -2)
            if rule.store is not None and rule.store.products is not None:
                rule.store.add(DeferredProduct(ctx.reference.weight, [x_NI, gradient_NO], rule))
            else:
                weight_gradient = compute_weight_gradient(gradient_NO, x_NI, rule, ctx.weight_dtype)
        return x_gradient, weight_gradient, None, bias_gradient, None, None


def _read_matrix(weight: Tensor, rule: ProductRule, dtype: torch.dtype) -> Tensor:
    """Return the matrix `[.., out, in]`: packed bytes are dequantised."""
    if weight.dtype == torch.uint8:
        return nf4.unpack(weight, count_columns(weight.shape[-1], rule.num_in), dtype)
    return weight.mT if rule.is_transposed else weight


class _ExpertProduct(torch.autograd.Function):
    """Grouped product that saves packed bytes as they are, or quantises its operands."""

    @staticmethod
    def forward(
        ctx: Any, x_MI: Tensor, weight: Tensor, counts_E: Tensor, rule: ProductRule
    ) -> Tensor:
        ctx.rule = rule
        ctx.weight_dtype = weight.dtype
        # Only the weight's gradient needs x.
        ctx.save_for_backward(x_MI if ctx.needs_input_grad[1] else None, weight, counts_E)
        weight_EOI = _read_matrix(weight, rule, x_MI.dtype)
        if rule.scaled is not None:
            return rule.scaled.compute_expert_output(x_MI, weight_EOI, counts_E)
        return multiply_grouped(x_MI, weight_EOI, counts_E, transposed=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_MI, weight, counts_E = ctx.saved_tensors
        rule: ProductRule = ctx.rule
        gradient_MO = gradients[0].contiguous()
        x_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            weight_EOI = _read_matrix(weight, rule, gradient_MO.dtype)
            if rule.scaled is None:
                x_gradient = multiply_grouped(gradient_MO, weight_EOI, counts_E, transposed=False)
            else:
                x_gradient = rule.scaled.compute_expert_input_gradient(
                    gradient_MO, weight_EOI, counts_E
                )
        if ctx.needs_input_grad[1]:
            left, right = (x_MI, gradient_MO) if rule.is_transposed else (gradient_MO, x_MI)
            weight_gradient = compute_grouped_weight_gradient(left, right, counts_E)
            weight_gradient = weight_gradient.to(ctx.weight_dtype)
        return x_gradient, weight_gradient, None, None
