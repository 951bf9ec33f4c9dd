"""Hooks of tensor parallelism; `shardwright.parallel.tensor_parallel` implements them.

Separate from the other hooks, which import the forward context, because the context imports
these.

Legend: B sequences, L tokens of this context rank, S tokens of this rank's residual stream (L,
or a shard of L under sequence parallelism), D hidden, V vocabulary rows of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from shardwright.model.products.product import Operands


class VocabularyHooks(Protocol):
    """Hooks of a vocabulary sharded over ranks. Losses use more: `numerics.VocabularyShard`."""

    @property
    def gather_logits(self) -> Callable[[Tensor], Tensor]:
        """Function from this rank's logits to the whole vocabulary's, equal on all ranks."""
        ...


class PipelineHooks(Protocol):
    """Products that overlap with the communication before or after them."""

    def multiply_gathered(self, x_BSD: Tensor, layers: Sequence[Operands]) -> list[Tensor]:
        """Multiply all tokens by column-parallel weights, `[B, L, O]` each."""
        ...

    def multiply_and_reduce(self, inputs: Sequence[Tensor], layers: Sequence[Operands]) -> Tensor:
        """Multiply each input `[B, L, I]` by its row-parallel weight; sum the products, without
        biases, to the residual stream."""
        ...


class TensorParallelHooks(Protocol):
    """Hooks of tensor parallelism: features and heads are sharded over `degree` ranks."""

    @property
    def rank(self) -> int:
        """Index of this rank in the tensor-parallel group, and so of its heads."""
        ...

    @property
    def degree(self) -> int:
        """Number of tensor-parallel ranks."""
        ...

    @property
    def sequence_parallel(self) -> bool:
        """True if the tokens of the residual stream are sharded over these ranks too."""
        ...

    @property
    def pipeline(self) -> PipelineHooks | None:
        """Products that overlap with communication; None if communication blocks."""
        ...

    def without_sequence_parallel(self) -> TensorParallelHooks:
        """Return these hooks without sequence parallelism, for generation token by token."""
        ...

    def prepare_input(self, x_BSD: Tensor) -> Tensor:
        """Prepare the residual stream for column-parallel products, `[B, L, D]`.

        The backward pass sums the gradient over the ranks.
        """
        ...

    def reduce_output(self, partial_BLD: Tensor) -> Tensor:
        """Sum a row-parallel product's partial outputs to the residual stream, `[B, S, D]`.

        May overwrite `partial_BLD`.
        """
        ...

    def select_local_tokens(self, x_BL: Tensor) -> Tensor:
        """Select this rank's tokens (dim 1) of a replicated tensor; no gradient flows."""
        ...

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in the backward pass too: each rank uses the sum differently."""
        ...

    def embed(
        self, ids_BL: Tensor, weight_VD: Tensor, vocab_size: int, padding_row: int | None
    ) -> Tensor:
        """Look up embeddings in this rank's rows, `[B, L, D]`; zero for other ranks' rows.

        `reduce_output` sums the results over the ranks.
        """
        ...

    def shard_vocabulary(self, vocab_size: int) -> VocabularyHooks:
        """Return the hooks of the sharded vocabulary, for the loss."""
        ...
