"""Products of tensor parallelism that overlap with their communication.

    forward                       backward
    gather the input, multiply    sum the input's gradient behind the weights' gradients
    multiply, sum the output      gather the output's gradient, multiply; then the weight's gradient

`chunked`: tokens are communicated in up to four chunks, in order, and the product of one chunk runs
during the communication of the next. With one chunk, numbers are those of blocking collectives, bit
by bit. `fused`: torch's kernels over symmetric memory multiply the tokens of one rank while those
of the next arrive. Gradients of inputs are reduced the same way by both.

Compiled code calls `operators`, which communicate in the same order.

Legend: B sequences, L tokens of this context rank, S tokens of this rank's residual stream, D
hidden, I inputs, O outputs of a matrix, N rows.

Source: Wang et al. 2023, Overlap Communication with Dependent Computation via Decomposition
(ASPLOS), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwright.model.communication_results import (
    is_result_restored,
    is_result_unread,
    keep_result,
)
from shardwright.model.products.product import (
    DeferredProduct,
    LayerReference,
    Operands,
    compute_weight_gradient,
)
from shardwright.model.result_names import get_result_name, name_results
from shardwright.parallel.pipelined import operators
from shardwright.parallel.pipelined.communication import (
    MatrixAndBias,
    PipelinedCommunication,
    multiply_rows,
)


class PipelinedProducts(PipelinedCommunication):
    """Products of one tensor-parallel group that overlap with their communication."""

    def multiply_gathered(self, x_BSD: Tensor, layers: Sequence[Operands]) -> list[Tensor]:
        """Multiply all tokens by each layer's matrix, `[B, L, O]`; the gradient of x is summed."""
        tensors = [tensor for operands in layers for tensor in (operands.matrix, operands.bias)]
        references = tuple(operands.layer for operands in layers)
        products: tuple[Tensor, ...] = _GatheredProducts.apply(x_BSD, self, references, *tensors)
        return list(products)

    def multiply_and_reduce(self, inputs: Sequence[Tensor], layers: Sequence[Operands]) -> Tensor:
        """Multiply each input by its layer's matrix and sum the products, over the ranks too:
        this rank's tokens of the sum, or all."""
        references = tuple(operands.layer for operands in layers)
        matrices = [operands.matrix for operands in layers]
        reduced: Tensor = _ReducedProducts.apply(self, references, *inputs, *matrices)
        return reduced


class _GatheredProducts(torch.autograd.Function):
    """Products of gathered tokens. The gradient of the tokens is summed while the weights'
    gradients are computed."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BSD: Tensor,
        pipeline: PipelinedProducts,
        layers: tuple[LayerReference, ...],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        matrices = [
            (_orient(matrix, layer), bias)
            for matrix, bias, layer in zip(tensors[::2], tensors[1::2], layers, strict=True)
        ]
        ticket = None
        if pipeline.sequence_parallel:
            gathered, ticket, products = _gather_and_multiply(pipeline, x_BSD, matrices)
        else:
            gathered = x_BSD.flatten(0, 1)[None]
            products = [
                rows.unflatten(0, x_BSD.shape[:2]) for rows in multiply_rows(gathered[0], matrices)
            ]
        ctx.pipeline = pipeline
        ctx.layers = layers
        # Only gradients of weights need the tokens.
        needs_tokens = any(ctx.needs_input_grad[3::2])
        ctx.save_for_backward(gathered if needs_tokens else None, ticket, *tensors[::2])
        ctx.num_chunks = gathered.shape[0]
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        gathered, ticket, *matrices = ctx.saved_tensors
        pipeline: PipelinedProducts = ctx.pipeline
        sorted_gradients = [
            pipeline.sort_by_chunk(gradient.detach(), ctx.num_chunks)
            if pipeline.sequence_parallel
            else gradient.detach().flatten(0, 1)[None]
            for gradient in gradients
        ]
        finish_sums: Callable[[Sequence[Tensor]], Tensor] | None = None
        if ctx.needs_input_grad[0]:
            oriented = [
                _orient(matrix, layer).t()
                for matrix, layer in zip(matrices, ctx.layers, strict=True)
            ]
            finish_sums = _launch_sums(pipeline, sorted_gradients, oriented, gradients[0].shape[0])
        results: list[Tensor | None] = []
        for index, (layer, gradient) in enumerate(zip(ctx.layers, sorted_gradients, strict=True)):
            needs_matrix, needs_bias = ctx.needs_input_grad[3 + 2 * index : 5 + 2 * index]
            matrix_gradient = None
            if needs_matrix:
                gradient_NO = gradient.flatten(0, 1)
                matrix_gradient = _multiply_gathered_rows(
                    pipeline, layer, gathered, ticket, gradient_NO, True
                )
            results.append(matrix_gradient)
            results.append(gradients[index].flatten(0, 1).sum(0) if needs_bias else None)
        x_gradient = None
        if finish_sums is not None:
            is_split = any(layer.rule.store is not None for layer in ctx.layers)
            x_gradient = finish_sums(
                [] if is_split else [each for each in results if each is not None]
            )
        return x_gradient, None, None, *results


class _ReducedProducts(torch.autograd.Function):
    """Sum of products, which is summed over the ranks. Inputs come first, then matrices."""

    @staticmethod
    def forward(
        ctx: Any, pipeline: PipelinedProducts, layers: tuple[LayerReference, ...], *tensors: Tensor
    ) -> Tensor:
        ctx.pipeline = pipeline
        ctx.layers = layers
        count = len(layers)
        inputs = tensors[:count]
        matrices = tensors[count:]
        needs_matrix = ctx.needs_input_grad[2 + count :]
        saved = [x if needs else None for x, needs in zip(inputs, needs_matrix, strict=True)]
        ctx.save_for_backward(*saved, *matrices)
        oriented = [_orient(*pair) for pair in zip(matrices, layers, strict=True)]

        if torch.compiler.is_compiling():
            summed: Tensor = operators.multiply_and_sum(inputs, oriented, pipeline.name)
            return summed

        def compute() -> Tensor:
            with name_results("partial_product"):
                return pipeline.multiply_and_sum(inputs, oriented)

        if is_result_unread():
            ranks = pipeline.group.size() if pipeline.sequence_parallel else 1
            batch, length, _ = inputs[0].shape
            empty = inputs[0].new_empty(())
            return empty.expand(batch, length // ranks, oriented[0].shape[1])
        return keep_result(compute)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        pipeline: PipelinedProducts = ctx.pipeline
        count = len(ctx.layers)
        saved = ctx.saved_tensors
        inputs = saved[:count]
        oriented = [_orient(*pair).t() for pair in zip(saved[count:], ctx.layers, strict=True)]
        gradient = gradients[0].detach()
        ticket = None
        if pipeline.sequence_parallel:
            gathered, ticket, input_gradients = _gather_and_multiply(
                pipeline, gradient, [(matrix_OI, None) for matrix_OI in oriented]
            )
        else:
            gathered = gradient.flatten(0, 1)[None]
            input_gradients = [
                (gathered[0] @ matrix_OI).unflatten(0, gradient.shape[:2]) for matrix_OI in oriented
            ]
        matrix_gradients: list[Tensor | None] = []
        for layer, x_BLI in zip(ctx.layers, inputs, strict=True):
            if x_BLI is None:
                matrix_gradients.append(None)
                continue
            x_NI = x_BLI.detach().flatten(0, 1)
            if pipeline.sequence_parallel:
                x_NI = pipeline.sort_by_chunk(x_BLI.detach(), gathered.shape[0]).flatten(0, 1)
            matrix_gradients.append(
                _multiply_gathered_rows(pipeline, layer, gathered, ticket, x_NI, False)
            )
        return None, None, *input_gradients, *matrix_gradients


def _gather_and_multiply(
    pipeline: PipelinedProducts, x_BSD: Tensor, matrices: Sequence[MatrixAndBias]
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Gather and multiply: gathered tokens, a ticket if they may be pending, and the products.

    A recomputation reuses the results that it has kept. They are kept whole here: the policy of a
    recomputation would keep those of chunks.
    """
    if torch.compiler.is_compiling():
        return _trace_gather_and_multiply(pipeline, x_BSD, matrices)
    name = get_result_name()
    has_products = is_result_restored()
    with name_results("gathered"):
        has_tokens = is_result_restored()
    products: list[Tensor] = []

    def gather() -> Tensor:
        with name_results("partial_product"):
            if has_products:
                return pipeline.gather(x_BSD)
            gathered, fresh = pipeline.gather_and_multiply(x_BSD, matrices)
        products.extend(fresh)
        return gathered

    with name_results("gathered"):
        gathered = keep_result(gather)
    if has_tokens and not has_products:
        with name_results("partial_product"):
            products = pipeline.multiply_arriving(gathered, [], matrices, x_BSD.shape[0])
    with name_results(name):
        return (
            gathered,
            None,
            [keep_result(partial(products.__getitem__, index)) for index in range(len(matrices))],
        )


def _trace_gather_and_multiply(
    pipeline: PipelinedProducts, x_BSD: Tensor, matrices: Sequence[MatrixAndBias]
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Gather and multiply in compiled code, where a recomputation keeps results of operators."""
    left = [matrix for matrix, _ in matrices]
    biases = [bias for _, bias in matrices]
    if pipeline.kind == "fused":
        gathered, *products = operators.gather_and_multiply(x_BSD, left, biases, pipeline.name)
        return gathered, None, products
    with name_results("gathered"):
        gathered, ticket = operators.launch_gathers(x_BSD, pipeline.name)
    products = operators.multiply_arriving(
        gathered, ticket, left, biases, x_BSD.shape[0], pipeline.name
    )
    return gathered, ticket, products


def _launch_sums(
    pipeline: PipelinedProducts,
    gathered: Sequence[Tensor],
    matrices: Sequence[Tensor],
    num_sequences: int,
) -> Callable[[Sequence[Tensor]], Tensor]:
    """Multiply, add and begin to sum; return the function that waits for the sum.

    It takes the results that compiled code computes before it waits.
    """
    if not torch.compiler.is_compiling():
        sums = pipeline.launch_sums(gathered, matrices, num_sequences)
        return lambda _earlier: sums.finish()
    ticket = operators.launch_sums(gathered, matrices, num_sequences, pipeline.name)
    first = gathered[0]
    ranks = pipeline.group.size() if pipeline.sequence_parallel else 1
    length = first.shape[0] * first.shape[1] // num_sequences // ranks
    shape = [num_sequences, length, matrices[0].shape[1]]

    def finish(earlier: Sequence[Tensor]) -> Tensor:
        summed: Tensor = operators.finish_sums(ticket, earlier, shape, first.dtype, first.device)
        return summed

    return finish


def _multiply_gathered_rows(
    pipeline: PipelinedProducts,
    layer: LayerReference,
    gathered: Tensor,
    ticket: Tensor | None,
    other_NO: Tensor,
    is_input: bool,
) -> Tensor | None:
    """Compute a weight's gradient from gathered rows, inputs or gradients, and the other factor."""
    if ticket is not None:
        is_left = is_input == layer.rule.is_transposed
        product: Tensor = operators.multiply_gathered_rows(
            gathered, ticket, other_NO, is_left, pipeline.name
        )
        return product
    rows_ND = gathered.detach().flatten(0, 1)
    if is_input:
        return _take_weight_gradient(layer, other_NO, rows_ND)
    return _take_weight_gradient(layer, rows_ND, other_NO)


def _take_weight_gradient(
    layer: LayerReference, gradient_NO: Tensor, x_NI: Tensor
) -> Tensor | None:
    """Compute a weight's gradient, or defer it under a schedule with split backward passes."""
    # Compiled blocks defer gradients by dividing their backward graph (`SplitBackward`).
    store = None if torch.compiler.is_compiling() else layer.rule.store
    if store is not None and store.products is not None:
        store.add(DeferredProduct(layer.weight, [x_NI, gradient_NO], layer.rule))
        return None
    return compute_weight_gradient(gradient_NO, x_NI, layer.rule, x_NI.dtype)


def _orient(matrix: Tensor | None, layer: LayerReference) -> Tensor:
    """Return a view of a layer's matrix as `[I, O]`."""
    assert matrix is not None
    return matrix if layer.rule.is_transposed else matrix.t()
