"""Where a decoder that lies over several ranks needs the others: protocols, kept by `shardwright.parallel`.

A decoder by itself has none of them. A cut one calls them at the few places where its function takes more than the rank holds, and
is written once for both. Rows of ids, labels, positions and documents always come whole; the decoder takes this rank's places.

Legend: B sequences, T tokens of the row, L tokens of this context rank, S tokens of this rank's residual stream (L, or its share of
L under sequence parallelism), D hidden, H query heads, K key/value heads, E head_dim, N tokens flat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from shardwright.model.tensor_cut import TensorCut

if TYPE_CHECKING:
    from shardwright.model.context import ForwardContext
    from shardwright.model.dropout import Dropout


@dataclass(frozen=True, eq=False)
class AttentionTerms:
    """What one layer's attention is, besides queries, keys and values: its number, and what turns products into weights.

    `window` counts the tokens that a token sees, itself included. `sinks_H` has a logit for each head held here.
    """

    layer: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    dropout_rate: float = 0.0
    sinks_H: Tensor | None = None


class ContextCut(Protocol):
    """Context parallelism: the row's tokens lie over ranks."""

    def places(self, num_tokens: int) -> Tensor:
        """Which places of a row of `num_tokens` this rank has, `[L]`, in its order."""
        ...

    def attend(
        self,
        terms: AttentionTerms,
        q_BHLE: Tensor,
        k_BKLE: Tensor,
        v_BKLE: Tensor,
        context: ForwardContext,
        dropout: Dropout | None,
    ) -> Tensor:
        """Attention of this rank's queries over the whole row, `[B, H, L, E]`."""
        ...


class Arrived(Protocol):
    """Rows at the ranks of their experts, and what was computed while they travelled."""

    rows_RD: Tensor
    counts_e: Tensor
    meanwhile: Tensor | None


class ExpertCut(Protocol):
    """Expert parallelism: experts lie over `degree` ranks, which exchange tokens. Also what routers ask of other ranks.

    `row_ranks` have tokens of the same rows (context parallelism). `loss_share` is this rank's share of a loss that
    tensor-parallel ranks all compute alike, and whose gradients are summed over them.
    """

    rank: int
    degree: int
    row_ranks: int
    loss_share: float

    def dispatch(self, rows_MD: Tensor, counts_E: Tensor, meanwhile: Callable[[], Tensor] | None) -> Any:
        """Rows sorted by expert to the ranks that hold the experts (`Arrived`); `meanwhile` runs while they travel."""
        ...

    def combine(self, out_RD: Tensor, arrived: Any) -> Tensor:
        """The experts' outputs back where their rows came from, in the order in which they were sent, `[M, D]`."""
        ...

    def sum_over_row(self, x: Tensor) -> Tensor:
        """`x` summed in place over `row_ranks`; no gradient passes."""
        ...

    def gather_row(self, experts_BLK: Tensor, places_L: Tensor | None) -> Tensor:
        """The choices of whole rows, `[B, T, K]`; no gradient passes."""
        ...


@dataclass(frozen=True, eq=False)
class Cuts:
    """What of a decoder lies over several ranks; None for what does not."""

    tensor: TensorCut | None = None
    context: ContextCut | None = None
    expert: ExpertCut | None = None


WHOLE = Cuts()
"""A decoder on one rank."""
