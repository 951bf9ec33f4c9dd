"""Communication of tensor parallelism that runs during products.

Gathered tokens stay in the order of their chunks, `[C, R, B, t]`: weights' gradients sum over them
in any order, and only the narrow results are copied into the order of the row.

Legend: B sequences, L tokens of this context rank, S tokens of this rank's residual stream, D
hidden, I inputs, O outputs of a matrix, R ranks, C chunks, t tokens of a chunk on one rank, N rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shardwright.errors import LayoutError
from shardwright.layout.degrees import MAX_TENSOR_CHUNKS
from shardwright.parallel.comm_timing import time_wait
from shardwright.parallel.direct_collectives import all_gather_single, reduce_scatter_single

MatrixAndBias = tuple[Tensor, Tensor | None]
"""A matrix `[I, O]` and the bias of its outputs."""

_communication_by_name: dict[str, PipelinedCommunication] = {}


def find_communication(name: str) -> PipelinedCommunication:
    """Return the communication of this process that has the name."""
    return _communication_by_name[name]


@dataclass(frozen=True)
class PipelinedCommunication:
    """Communication of one tensor-parallel group, during products of what it sends or receives."""

    group: dist.ProcessGroup
    kind: Literal["chunked", "fused"]
    sequence_parallel: bool
    name: str = field(init=False, repr=False, compare=False)
    """Name by which the operators of compiled code find this communication in its process."""

    def __post_init__(self) -> None:
        name = f"{self.group.group_name} {self.kind} {self.sequence_parallel}"
        object.__setattr__(self, "name", name)
        _communication_by_name[name] = self

    def count_chunks(self, num_tokens: int) -> int:
        """Return the chunks of a rank's `num_tokens` tokens."""
        most = 1 if self.kind == "fused" else MAX_TENSOR_CHUNKS
        return next(count for count in (most, 2, 1) if num_tokens % count == 0)

    def launch_gathers(self, x_BSD: Tensor) -> tuple[Tensor, list[Any]]:
        """Begin to gather all tokens in the order of chunks, `[C, N / C, D]`, chunk by chunk."""
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

    def gather(self, x_BSD: Tensor) -> Tensor:
        """Gather all tokens in the order of chunks, `[C, N / C, D]`."""
        gathered, works = self.launch_gathers(x_BSD)
        self.wait(works)
        return gathered

    def gather_and_multiply(
        self, x_BSD: Tensor, matrices: Sequence[MatrixAndBias]
    ) -> tuple[Tensor, list[Tensor]]:
        """Gather all tokens as `gather` does, and multiply them by each matrix, `[B, L, O]`."""
        if self.kind == "fused":
            return self._run_fused_gather(x_BSD, matrices)
        gathered, works = self.launch_gathers(x_BSD)
        return gathered, self.multiply_arriving(gathered, works, matrices, x_BSD.shape[0])

    def multiply_arriving(
        self,
        gathered: Tensor,
        works: Sequence[Any],
        matrices: Sequence[MatrixAndBias],
        num_sequences: int,
    ) -> list[Tensor]:
        """Multiply gathered tokens by each matrix, `[B, L, O]`; first wait for each chunk.

        `works` has the gather of each chunk, or nothing if all tokens are there.
        """
        results = []
        for index, rows_ND in enumerate(gathered):
            if works:
                self.wait([works[index]])
            results.append(multiply_rows(rows_ND, matrices))
        return [self.sort_by_token(chunks, num_sequences) for chunks in zip(*results, strict=True)]

    def multiply_and_sum(self, inputs: Sequence[Tensor], matrices: Sequence[Tensor]) -> Tensor:
        """Multiply, add, and sum over the ranks: this rank's tokens of the residual stream."""
        if self.sequence_parallel:
            return self._sum_own_tokens(inputs, matrices)
        return self._sum_all_tokens(inputs, matrices)

    def launch_sums(
        self, gathered: Sequence[Tensor], matrices: Sequence[Tensor], num_sequences: int
    ) -> PendingSums:
        """Multiply gathered rows, `[C, N / C, O]`, by each matrix, add, and begin to sum."""
        sums = PendingSums(self, num_sequences)
        for rows in zip(*gathered, strict=True):
            sums.launch(add_products(rows, matrices))
        return sums

    def _sum_own_tokens(self, inputs: Sequence[Tensor], matrices: Sequence[Tensor]) -> Tensor:
        """Sum over the ranks and return this rank's tokens, `[B, S, O]`."""
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
        sums = PendingSums(self, num_sequences)
        parts = [x_BLI.unflatten(1, (size, count, -1)) for x_BLI in inputs]
        for chunk in range(count):
            rows = [part[:, :, chunk].transpose(0, 1).flatten(0, 2) for part in parts]
            sums.launch(add_products(rows, matrices))
        return sums.finish()

    def _sum_all_tokens(self, inputs: Sequence[Tensor], matrices: Sequence[Tensor]) -> Tensor:
        """Sum over the ranks; every rank gets the sum, `[B, L, O]`."""
        rows = [x_BLI.flatten(0, 1) for x_BLI in inputs]
        summed_NO = rows[0].new_empty(rows[0].shape[0], matrices[0].shape[1])
        works = []
        chunks = zip(*(each.chunk(MAX_TENSOR_CHUNKS) for each in (*rows, summed_NO)), strict=True)
        for *rows_of_chunk, out_NO in chunks:
            add_products(rows_of_chunk, matrices, out_NO)
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

    def _run_fused_gather(
        self, x_BSD: Tensor, matrices: Sequence[MatrixAndBias]
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


class PendingSums:
    """Sums of the ranks' partial results, one chunk of tokens at a time."""

    def __init__(self, pipeline: PipelinedCommunication, num_sequences: int) -> None:
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


def multiply_rows(rows_NI: Tensor, matrices: Sequence[MatrixAndBias]) -> list[Tensor]:
    return [
        rows_NI @ matrix if bias is None else torch.addmm(bias, rows_NI, matrix)
        for matrix, bias in matrices
    ]


def add_products(
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
