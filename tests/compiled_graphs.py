"""Counting of the graphs into which torch compiles a decoder's blocks, without code generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from functorch.compile import (  # type: ignore[import-untyped]
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from shardwright.model import Decoder
from shardwright.model.products.product import WeightGradientStore
from shardwright.model.products.split_backward import SplitBackward


class GraphCounter:
    """Backend of torch.compile that counts graphs, and runs their operations one by one.

    `fullgraph` makes a graph break an error, and also the compiler's limit of recompilations,
    at which it otherwise falls back to eager code.
    """

    def __init__(self) -> None:
        self.num_forward = 0
        self.num_backward = 0
        self.num_forward_collectives = 0
        self.num_backward_collectives = 0

    def compile(self, decoder: Decoder, **options: Any) -> None:
        """Compile the decoder's blocks with this backend."""
        torch._dynamo.reset()
        decoder.compile_blocks(
            backend=aot_autograd(
                fw_compiler=self._count_forward,
                bw_compiler=self._count_backward,
                partition_fn=min_cut_rematerialization_partition,  # Inductor's
            ),
            **{"fullgraph": True, **options},
        )

    def _count_forward(self, graph: Any, _inputs: Sequence[Tensor]) -> Callable[..., Any]:
        self.num_forward += 1
        self.num_forward_collectives += _count_collectives(graph)
        return make_boxed_func(graph.forward)

    def _count_backward(self, graph: Any, _inputs: Sequence[Tensor]) -> Callable[..., Any]:
        self.num_backward += 1
        self.num_backward_collectives += _count_collectives(graph)
        return make_boxed_func(graph.forward)

    def compile_split(self, decoder: Decoder, store: WeightGradientStore) -> None:
        """Compile the decoder's blocks with backward graphs in two parts, each counted."""

        def compile_half(graph: Any, inputs: Sequence[Tensor], **_: Any) -> Callable[..., Any]:
            return self._count_backward(graph, inputs)

        def compile_block(graph: Any, inputs: Sequence[Tensor], compile_backward: Any) -> Any:
            backend = aot_autograd(
                fw_compiler=self._count_forward,
                bw_compiler=lambda part, values: compile_backward(part, values, compile_half),
                partition_fn=min_cut_rematerialization_partition,
            )
            return backend(graph, inputs)

        torch._dynamo.reset()
        is_whole = decoder.shape.experts is None
        decoder.compile_blocks(backend=SplitBackward(store, compile_block), fullgraph=is_whole)

    @property
    def counts(self) -> tuple[int, int]:
        """Forward and backward graphs."""
        return self.num_forward, self.num_backward


PIPELINED_COMMUNICATION = (
    "launch_gathers",
    "gather_and_multiply",
    "multiply_and_sum",
    "launch_sums",
)
"""Operators that begin to communicate during products."""


def _count_collectives(graph: Any) -> int:
    targets = [str(node.target).split(".") for node in graph.graph.nodes]
    return sum(
        (target[0] == "_c10d_functional" and target[1] != "wait_tensor")
        or (target[0] == "shardwright" and target[1] in PIPELINED_COMMUNICATION)
        for target in targets
    )


def compile_boxed(
    function: Callable[..., Any], context: AbstractContextManager[Any] | None = None
) -> Callable[..., Any]:
    """Compile a function to one graph whose operations run one by one, inside the context."""

    def box(graph: Any, _inputs: Sequence[Tensor]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with context or nullcontext():
                return graph.forward(*arguments)

        return make_boxed_func(run)

    backend = aot_autograd(fw_compiler=box, bw_compiler=box)
    compiled: Callable[..., Any] = torch.compile(function, backend=backend, fullgraph=True)
    return compiled
