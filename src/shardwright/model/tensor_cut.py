"""What a decoder asks of the ranks that hold the other features and heads of its layers; kept by `shardwright.parallel.tensor`.

Apart from `cuts`, which knows the forward pass, because the forward pass knows this.

Legend: B sequences, L tokens of this context rank, S tokens of this rank's residual stream (L, or its share of L under sequence
parallelism), D hidden, V vocabulary rows of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Vocabulary(Protocol):
    """A vocabulary whose rows lie over ranks; what a loss needs beyond this is the loss's own (`numerics.VocabularyShard`)."""

    @property
    def whole(self) -> Callable[[Tensor], Tensor]:
        """Logits of this rank's rows -> logits of all rows, equal on every rank."""
        ...


class TensorCut(Protocol):
    """Tensor parallelism: features and heads lie over `degree` ranks, and with `sequence_parallel` the residual stream's tokens."""

    @property
    def rank(self) -> int:
        """Which share of the heads this rank has."""
        ...

    @property
    def degree(self) -> int:
        """Number of ranks."""
        ...

    @property
    def sequence_parallel(self) -> bool:
        """Whether the residual stream's tokens lie over the ranks, too."""
        ...

    def without_sequence(self) -> TensorCut:
        """The same cut for a pass whose tokens are too few to be cut: new tokens, one at a time."""
        ...

    def enter(self, x_BSD: Tensor) -> Tensor:
        """The residual stream as column-cut products want it, `[B, L, D]`; its gradient is summed over the ranks."""
        ...

    def leave(self, partial_BLD: Tensor) -> Tensor:
        """A row-cut product's partial sums, summed, as the residual stream wants them, `[B, S, D]`."""
        ...

    def share(self, x_BL: Tensor) -> Tensor:
        """The residual stream's tokens (dimension 1) of what all ranks have alike and no gradient passes."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """A sum over the ranks, with which each of them goes on in its own way: gradients are summed, too."""
        ...

    def look_up(self, ids_BL: Tensor, weight_VD: Tensor, vocab_size: int, padding_row: int | None) -> Tensor:
        """This rank's share of the embeddings, `[B, L, D]`: zero where another has the row. `leave` sums the shares."""
        ...

    def vocabulary(self, vocab_size: int) -> Vocabulary:
        """Which rows of the head this rank has, as the loss wants to know it."""
        ...
