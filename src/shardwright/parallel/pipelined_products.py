"""Products of tensor parallelism that overlap with their communication.

    forward                       backward
    gather the input, multiply    sum the input's gradient behind the weights' gradients
    multiply, sum the output      gather the output's gradient, multiply; then the weight's gradient

`chunked`: tokens are communicated in up to four chunks, in order, and the product of one chunk runs
beside the communication of the next. With one chunk, numbers are those of blocking collectives, bit
by bit. `fused`: torch's kernels over symmetric memory multiply the tokens of one rank while those
of the next arrive. Gradients of inputs are reduced the same way by both.

Gathered tokens stay in the order of their chunks, `[C, R, B, t]`: weights' gradients sum over them
in any order, and only the narrow results are copied into the order of the row.

Legend: B sequences, L tokens of this context rank, S tokens of this rank's residual stream, D
hidden, I inputs, O outputs of a matrix, R ranks, C chunks, t tokens of a chunk on one rank, N rows.

Source: Wang et al. 2023, Overlap Communication with Dependent Computation via Decomposition
(ASPLOS), section 3.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shardwright.errors import LayoutError
from shardwright.layout.degrees import MAX_TENSOR_CHUNKS
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
from shardwright.parallel.comm_timing import all_gather_single, reduce_scatter_single, time_wait

_MatrixAndBias = tuple[Tensor, Tensor | None]
"""A matrix `[I, O]` and the bias of its outputs."""


@dataclass(frozen=True)
class PipelinedProducts:
    """Products of one tensor-parallel group that overlap with their communication."""

    group: dist.ProcessGroup
    kind: Literal["chunked", "fused"]
    sequence_parallel: bool

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

    def count_chunks(self, num_tokens: int) -> int:
        """Return the chunks of a rank's `num_tokens` tokens."""
        most = 1 if self.kind == "fused" else MAX_TENSOR_CHUNKS
        return next(count for count in (most, 2, 1) if num_tokens % count == 0)

    def gather(self, x_BSD: Tensor) -> Tensor:
        """Gather all tokens in the order of chunks, `[C, N / C, D]`."""
        gathered, works = self._launch_gathers(x_BSD)
        self.wait(works)
        return gathered

    def gather_and_multiply(
        self, x_BSD: Tensor, matrices: Sequence[_MatrixAndBias]
    ) -> tuple[Tensor, list[Tensor]]:
        """Gather all tokens as `gather` does, and multiply them by each matrix, `[B, L, O]`."""
        if self.kind == "fused":
            return self._run_fused_gather(x_BSD, matrices)
        gathered, works = self._launch_gathers(x_BSD)
        results = []
        for rows_ND, work in zip(gathered, works, strict=True):
            self.wait([work])
            results.append(_multiply_rows(rows_ND, matrices))
        return gathered, [
            self.sort_by_token(chunks, x_BSD.shape[0]) for chunks in zip(*results, strict=True)
        ]

    def multiply_gathered_rows(
        self, gathered: Tensor, matrices: Sequence[_MatrixAndBias], num_sequences: int
    ) -> list[Tensor]:
        """Multiply gathered tokens by each matrix, `[B, L, O]`."""
        results = [_multiply_rows(rows_ND, matrices) for rows_ND in gathered]
        return [self.sort_by_token(chunks, num_sequences) for chunks in zip(*results, strict=True)]

    def multiply_and_scatter(self, inputs: Sequence[Tensor], matrices: Sequence[Tensor]) -> Tensor:
        """Multiply and add, sum over the ranks, and return this rank's tokens, `[B, S, O]`."""
        size = self.group.size()
        num_sequences, length = inputs[0].shape[:2]
        if self.kind == "fused":
            own = [
                _load_fused_kernels(x_BLI).fused_matmul_reduce_scatter(
                    self.sort_by_chunk(x_BLI, 1)[0], matrix_IO, "sum", 0, self.group.group_name
                )
                for x_BLI, matrix_IO in zip(inputs, matrices, strict=True)
            ]
            return functools.reduce(Tensor.add_, own).unflatten(0, (num_sequences, -1))
        count = self.count_chunks(length // size)
        sums = _PendingSums(self, num_sequences)
        parts = [x_BLI.unflatten(1, (size, count, -1)) for x_BLI in inputs]
        for chunk in range(count):
            rows = [part[:, :, chunk].transpose(0, 1).flatten(0, 2) for part in parts]
            sums.launch(_add_products(rows, matrices))
        return sums.finish()

    def multiply_and_sum(self, inputs: Sequence[Tensor], matrices: Sequence[Tensor]) -> Tensor:
        """Multiply and add, and sum over the ranks; every rank gets the sum, `[B, L, O]`."""
        rows = [x_BLI.flatten(0, 1) for x_BLI in inputs]
        summed_NO = rows[0].new_empty(rows[0].shape[0], matrices[0].shape[1])
        works = []
        chunks = zip(*(each.chunk(MAX_TENSOR_CHUNKS) for each in (*rows, summed_NO)), strict=True)
        for *rows_of_chunk, out_NO in chunks:
            _add_products(rows_of_chunk, matrices, out_NO)
            works.append(dist.all_reduce(out_NO, group=self.group, async_op=True))
        self.wait(works)
        return summed_NO.unflatten(0, inputs[0].shape[:2])

    def sort_by_chunk(self, x_BLI: Tensor, num_chunks: int) -> Tensor:
        """Copy all tokens into the order of gathered ones, `[C, N / C, I]`."""
        parts = x_BLI.unflatten(1, (self.group.size(), num_chunks, -1))
        return parts.permute(2, 1, 0, 3, 4).reshape(num_chunks, -1, x_BLI.shape[-1])

    def sort_by_token(self, chunks: Sequence[Tensor], num_sequences: int) -> Tensor:
        """Copy results of gathered tokens, `[N / C, O]` each, into the row's order, `[B, L, O]`."""
        size = self.group.size()
        parts = [rows.unflatten(0, (size, num_sequences, -1)).transpose(0, 1) for rows in chunks]
        # Rows of one chunk and one sequence are in the row's order.
        return parts[0].flatten(1, 2) if len(parts) == 1 else torch.stack(parts, 2).flatten(1, 3)

    def wait(self, works: Sequence[Any]) -> None:
        """Wait for communication, on CUDA in the stream."""
        with time_wait(self.group):
            for work in works:
                work.wait()

    def _launch_gathers(self, x_BSD: Tensor) -> tuple[Tensor, list[Any]]:
        length, width = x_BSD.shape[1:]
        count = self.count_chunks(length)
        # Chunks of one sequence are contiguous in place.
        own = x_BSD.unflatten(1, (count, -1)).movedim(1, 0).reshape(count, -1, width)
        gathered = x_BSD.new_empty(count, self.group.size() * own.shape[1], width)
        works = [
            all_gather_single(rows, chunk.contiguous(), group=self.group, async_op=True)
            for rows, chunk in zip(gathered, own, strict=True)
        ]
        return gathered, works

    def _run_fused_gather(
        self, x_BSD: Tensor, matrices: Sequence[_MatrixAndBias]
    ) -> tuple[Tensor, list[Tensor]]:
        gathered_ND, products = _load_fused_kernels(x_BSD).fused_all_gather_matmul(
            x_BSD.flatten(0, 1),
            [matrix for matrix, _ in matrices],
            0,
            self.group.group_name,
            return_A=True,
        )
        biased = [
            rows if bias is None else rows.add_(bias)
            for rows, (_, bias) in zip(products, matrices, strict=True)
        ]
        return gathered_ND[None], [self.sort_by_token([rows], x_BSD.shape[0]) for rows in biased]


class _PendingSums:
    """Sums of the ranks' partial results, one chunk of tokens at a time."""

    def __init__(self, pipeline: PipelinedProducts, num_sequences: int) -> None:
        self._pipeline = pipeline
        self._num_sequences = num_sequences
        self._sums: list[Tensor] = []
        self._pending: list[tuple[Any, Tensor]] = []

    def launch(self, partial_NO: Tensor) -> None:
        """Begin to sum the rows of the next chunk: those of all ranks, in the order of ranks, or,
        without sequence parallelism, all rows of the only chunk."""
        group = self._pipeline.group
        if self._pipeline.sequence_parallel:
            own = partial_NO.new_empty(partial_NO.shape[0] // group.size(), partial_NO.shape[1])
            work = reduce_scatter_single(own, partial_NO, group=group, async_op=True)
        else:
            own = partial_NO
            work = dist.all_reduce(own, group=group, async_op=True)
        self._sums.append(own)
        self._pending.append((work, partial_NO))

    def finish(self) -> Tensor:
        """Wait, and return the residual stream's tokens of all chunks, `[B, S, O]`."""
        self._pipeline.wait([work for work, _ in self._pending])
        self._pending.clear()
        parts = [rows.unflatten(0, (self._num_sequences, -1)) for rows in self._sums]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


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
        if pipeline.sequence_parallel:
            gathered, products = _gather_and_multiply(pipeline, x_BSD, matrices)
        else:
            gathered = x_BSD.flatten(0, 1)[None]
            products = [
                rows.unflatten(0, x_BSD.shape[:2]) for rows in _multiply_rows(gathered[0], matrices)
            ]
        ctx.pipeline = pipeline
        ctx.layers = layers
        # Only gradients of weights need the tokens.
        needs_tokens = any(ctx.needs_input_grad[3::2])
        ctx.save_for_backward(gathered if needs_tokens else None, *tensors[::2])
        ctx.num_chunks = gathered.shape[0]
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        gathered, *matrices = ctx.saved_tensors
        pipeline: PipelinedProducts = ctx.pipeline
        sorted_gradients = [
            pipeline.sort_by_chunk(gradient.detach(), ctx.num_chunks)
            if pipeline.sequence_parallel
            else gradient.detach().flatten(0, 1)[None]
            for gradient in gradients
        ]
        pending: _PendingSums | None = None
        if ctx.needs_input_grad[0]:
            pending = _PendingSums(pipeline, gradients[0].shape[0])
            oriented = [
                _orient(matrix, layer).t()
                for matrix, layer in zip(matrices, ctx.layers, strict=True)
            ]
            for rows in zip(*sorted_gradients, strict=True):
                pending.launch(_add_products(rows, oriented))
        results: list[Tensor | None] = []
        for index, (layer, gradient) in enumerate(zip(ctx.layers, sorted_gradients, strict=True)):
            needs_matrix, needs_bias = ctx.needs_input_grad[3 + 2 * index : 5 + 2 * index]
            gradient_NO = gradient.flatten(0, 1)
            tokens_ND = gathered.detach().flatten(0, 1) if needs_matrix else None
            results.append(_take_weight_gradient(layer, gradient_NO, tokens_ND))
            results.append(gradients[index].flatten(0, 1).sum(0) if needs_bias else None)
        x_gradient = None if pending is None else pending.finish()
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

        def compute() -> Tensor:
            with name_results("partial_product"):
                if pipeline.sequence_parallel:
                    return pipeline.multiply_and_scatter(inputs, oriented)
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
        if pipeline.sequence_parallel:
            gathered, input_gradients = pipeline.gather_and_multiply(
                gradient, [(matrix_OI, None) for matrix_OI in oriented]
            )
        else:
            gathered = gradient.flatten(0, 1)[None]
            input_gradients = [
                (gathered[0] @ matrix_OI).unflatten(0, gradient.shape[:2]) for matrix_OI in oriented
            ]
        matrix_gradients = []
        for layer, x_BLI in zip(ctx.layers, inputs, strict=True):
            x_NI = None
            if x_BLI is not None:
                x_NI = x_BLI.detach().flatten(0, 1)
                if pipeline.sequence_parallel:
                    x_NI = pipeline.sort_by_chunk(x_BLI.detach(), gathered.shape[0]).flatten(0, 1)
            matrix_gradients.append(_take_weight_gradient(layer, gathered.flatten(0, 1), x_NI))
        return None, None, *input_gradients, *matrix_gradients


def _gather_and_multiply(
    pipeline: PipelinedProducts, x_BSD: Tensor, matrices: Sequence[_MatrixAndBias]
) -> tuple[Tensor, list[Tensor]]:
    """Gather and multiply; a recomputation reuses the results that it has kept.

    The results are kept whole here: the policy of a recomputation would keep those of chunks.
    """
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
            products = pipeline.multiply_gathered_rows(gathered, matrices, x_BSD.shape[0])
    with name_results(name):
        return gathered, [
            keep_result(partial(products.__getitem__, index)) for index in range(len(matrices))
        ]


def _load_fused_kernels(x: Tensor) -> Any:
    """Return PyTorch's operators over symmetric memory.

    Raises:
        LayoutError: they have no kernel for the device of `x`.
    """
    from torch.distributed import _symmetric_memory  # registers them

    assert _symmetric_memory is not None
    key = x.device.type.upper()
    name = "symm_mem::fused_all_gather_matmul"
    is_fake = isinstance(x, FakeTensor)
    if not is_fake and not torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
        raise LayoutError(
            f"PyTorch {torch.__version__} has no kernel {name} for a {x.device.type} device",
            field="layout.async_tensor_parallel",
            got="fused",
            allowed="none, auto, chunked",
            remedy="Use chunked: it has the same products and sums",
        )
    return torch.ops.symm_mem


def _multiply_rows(rows_NI: Tensor, matrices: Sequence[_MatrixAndBias]) -> list[Tensor]:
    return [
        rows_NI @ matrix if bias is None else torch.addmm(bias, rows_NI, matrix)
        for matrix, bias in matrices
    ]


def _add_products(
    rows: Sequence[Tensor], matrices: Sequence[Tensor], out: Tensor | None = None
) -> Tensor:
    """Sum the products of each layer's rows, from the last layer on as autograd does."""
    total: Tensor | None = None
    for rows_NI, matrix_IO in zip(reversed(rows), reversed(matrices), strict=True):
        if total is None:
            total = torch.mm(rows_NI, matrix_IO, out=out)
        else:
            total.add_(rows_NI @ matrix_IO)
    assert total is not None
    return total


def _take_weight_gradient(
    layer: LayerReference, gradient_NO: Tensor, x_NI: Tensor | None
) -> Tensor | None:
    """Compute a weight's gradient, or defer it under a schedule with split backward passes."""
    if x_NI is None:
        return None
    store = layer.rule.store
    if store is not None and store.products is not None:
        store.products.append(DeferredProduct(layer.weight, x_NI, gradient_NO, layer.rule))
        return None
    return compute_weight_gradient(gradient_NO, x_NI, layer.rule)


def _orient(matrix: Tensor | None, layer: LayerReference) -> Tensor:
    """Return a view of a layer's matrix as `[I, O]`."""
    assert matrix is not None
    return matrix if layer.rule.is_transposed else matrix.t()
