"""Where a decoder that lies over several ranks needs the others: three protocols, kept by `shardwright.parallel`.

A decoder by itself has none of them. A cut one calls them at the few places where its function takes more than the rank holds, and
is written once for both. Rows of ids, labels, positions and documents always come whole; the decoder takes this rank's places.

Legend: B sequences, T tokens of the row, L tokens of this context rank, S tokens of this rank's residual stream (L, or its share of
L under sequence parallelism), D hidden, H query heads, K key/value heads, E head_dim, N tokens flat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from shardwright.model.attention import Attention
    from shardwright.model.context import ForwardContext
    from shardwright.model.dropout import Dropout


class TensorCut(Protocol):
    """Tensor parallelism: features and heads lie over `degree` ranks, and with `sequence_parallel` the residual stream's tokens."""

    rank: int
    degree: int
    sequence_parallel: bool

    def enter(self, x_BSD: Tensor) -> Tensor:
        """The residual stream as column-cut products want it, `[B, L, D]`; its gradient is summed over the ranks."""
        ...

    def leave(self, partial_BLD: Tensor) -> Tensor:
        """A row-cut product's partial sums, summed, as the residual stream wants them, `[B, S, D]`."""
        ...

    def share(self, x_BL: Tensor) -> Tensor:
        """This rank's tokens (dimension 1) of what all ranks have alike."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """A sum over the ranks that all of them go on with: gradients are summed, too."""
        ...


class ContextCut(Protocol):
    """Context parallelism: the row's tokens lie over ranks."""

    def places(self, num_tokens: int) -> Tensor:
        """Which places of a row of `num_tokens` this rank has, `[L]`, in its order."""
        ...

    def attend(
        self,
        attention: Attention,
        q_BHLE: Tensor,
        k_BKLE: Tensor,
        v_BKLE: Tensor,
        context: ForwardContext,
        dropout: Dropout | None,
    ) -> Tensor:
        """Attention of this rank's queries over the whole row, `[B, H, L, E]`."""
        ...


class ExpertCut(Protocol):
    """Expert parallelism: experts lie over `degree` ranks, which exchange tokens."""

    rank: int
    degree: int

    def dispatch(self, x_ND: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Rows sorted by expert to the ranks that hold the experts: their rows, rows per held expert, and the way back."""
        ...

    def combine(self, y_MD: Tensor, way_back: Any) -> Tensor:
        """The experts' outputs back where their rows came from, in the order in which they were sent."""
        ...


@dataclass(frozen=True, eq=False)
class Cuts:
    """What of a decoder lies over several ranks; None for what does not."""

    tensor: TensorCut | None = None
    context: ContextCut | None = None
    expert: ExpertCut | None = None


WHOLE = Cuts()
"""A decoder on one rank."""
