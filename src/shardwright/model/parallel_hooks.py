"""Communication hooks of a parallelised decoder; `shardwright.parallel` implements them.

On one rank the decoder has no hooks; the same code serves both cases. Rows of ids, labels,
positions and documents are always whole; the decoder selects this rank's tokens.

Legend: B sequences, T tokens of the row, L tokens of this context rank, S tokens of this rank's
residual stream (L, or a shard of L under sequence parallelism), D hidden, H query heads, K
key/value heads, E head_dim, N tokens flat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from shardwright.config.data import IGNORED_LABEL
from shardwright.model.attention.fused_attention import AttentionSettings
from shardwright.model.tensor_parallel_hooks import TensorParallelHooks

if TYPE_CHECKING:
    from shardwright.model.dropout import Dropout
    from shardwright.model.forward_context import ForwardContext
    from shardwright.model.products.row_places import RowPlaces
    from shardwright.model.routing import Routing


class ContextParallelHooks(Protocol):
    """Hooks of context parallelism: the tokens of a row are sharded over ranks.

    With `has_whole_rows`, attention computes whole rows of some heads on each rank.
    """

    has_whole_rows: bool

    def count_local_tokens(self, num_tokens: int) -> int:
        """Count this rank's tokens of a row of `num_tokens`."""
        ...

    def split_rows(
        self,
        num_tokens: int,
        document_ids_BT: Tensor | None,
        host_document_ids_BT: np.ndarray | None = None,
    ) -> Any:
        """Return the split of the rows of a forward pass over ranks, `ForwardContext.row_chunks`.

        Called outside compiled code. Without `host_document_ids_BT`, the same ids in host memory,
        it reads those of the device.
        """
        ...

    def find_local_tokens(self, row_chunks: Any) -> Tensor:
        """Return the indices in a row of this rank's tokens, `[L]`."""
        ...

    def select_local_tokens(self, x_BT: np.ndarray, row_chunks: Any) -> np.ndarray:
        """Select this rank's tokens of rows in host memory, `[B, L]`, in the same order."""
        ...

    def attend(
        self,
        settings: AttentionSettings,
        q_BHLE: Tensor,
        k_BKLE: Tensor,
        v_BKLE: Tensor,
        context: ForwardContext,
        dropout: Dropout | None,
    ) -> Tensor:
        """Compute attention of this rank's queries over the whole row, `[B, H, L, E]`."""
        ...


class DispatchedTokens(Protocol):
    """Rows at the ranks of their experts, and the rows of each expert there.

    After a padded exchange `counts_e` has one more entry, for the padding.
    """

    rows_RD: Tensor
    counts_e: Tensor


class ExpertParallelHooks(Protocol):
    """Hooks of expert parallelism, and communication of the routers.

    Experts are sharded over `degree` ranks, which exchange tokens in `num_parts` parts, one during
    the experts of another. `num_row_ranks` is the number of ranks with tokens of the same rows
    (context parallelism). `loss_share` is the factor on a loss that tensor-parallel ranks all
    compute and whose gradients are summed over them.
    """

    rank: int
    degree: int
    num_parts: int
    num_row_ranks: int
    loss_share: float

    def exchange_counts(self, counts_HE: Tensor, num_choices: Sequence[int]) -> Sequence[Any]:
        """Exchange each part's numbers of rows of each expert, which `start_dispatch` needs.

        The host waits for them. `num_choices` are the sums over experts if no choice was dropped.
        """
        ...

    def keep_sent_slots(self, slots_M: Tensor, counts: Any) -> Tensor:
        """Return the slots of the rows to send, the first ones; the others are dropped choices."""
        ...

    def start_dispatch(self, rows_MD: Tensor, counts: Any) -> Callable[[], Any]:
        """Start to send rows, sorted by expert, to the ranks of their experts.

        Returns:
            The function that waits for them and returns `DispatchedTokens`.
        """
        ...

    def start_combine(self, out_RD: Tensor, dispatched: Any) -> Callable[[], Tensor]:
        """Start to send the experts' outputs back to the source ranks.

        Returns:
            The function that waits for them and returns them in the original order, `[M, D]`.
        """
        ...

    def sum_over_row(self, x: Tensor) -> Tensor:
        """Sum `x` in place over the ranks of the same rows; no gradient flows."""
        ...

    def gather_row(self, experts_BLK: Tensor, token_indices_L: Tensor | None) -> Tensor:
        """Gather the chosen experts of whole rows, `[B, T, K]`; no gradient flows."""
        ...


class TokenExchangeHooks(Protocol):
    """Hooks of another exchange of rows than `ExpertParallelHooks`."""

    def place_rows(self, experts_NK: Tensor, counts_E: Tensor) -> RowPlaces | None:
        """Place the rows of a training step's choices, padding included; None if this exchange
        has no padding. `counts_E` are the choices of each expert that are not dropped."""
        ...

    def accepts(self, routing: Routing) -> bool:
        """Return False for rows that `ExpertParallelHooks` exchanges instead."""
        ...

    def run_experts(
        self,
        experts: Callable[[Tensor, Tensor], Tensor],
        x_ND: Tensor,
        routing: Routing,
        overlapped_compute: Callable[[], Tensor] | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the weighted sum of each token's experts, `[N, D]`, and `overlapped_compute`'s
        result, which runs while rows are sent.

        `experts`: (rows sorted by expert, rows of each expert) -> results.
        """
        ...


@dataclass(frozen=True, eq=False)
class ParallelHooks:
    """Hooks of a decoder for each kind of parallelism; None for a kind that is not used."""

    tensor: TensorParallelHooks | None = None
    context: ContextParallelHooks | None = None
    expert: ExpertParallelHooks | None = None
    token_exchange: TokenExchangeHooks | None = None
    """Exchange in place of `expert`'s for the rows that it accepts."""

    def split_rows(
        self,
        num_tokens: int,
        document_ids_BT: Tensor | None,
        host_document_ids_BT: np.ndarray | None,
    ) -> Any:
        """Split rows over the context ranks that share them; None if no ranks do."""
        if self.context is None:
            return None
        return self.context.split_rows(num_tokens, document_ids_BT, host_document_ids_BT)

    def find_local_tokens(self, row_chunks: Any) -> Tensor | None:
        """Return the indices in the row of this rank's tokens, `[L]`; None for all."""
        return None if self.context is None else self.context.find_local_tokens(row_chunks)

    def count_supervised(self, host_labels_BT: np.ndarray | None, row_chunks: Any) -> int | None:
        """Count the supervised tokens of this rank; None if the host does not have the labels."""
        if host_labels_BT is None:
            return None
        if self.context is not None:
            host_labels_BT = self.context.select_local_tokens(host_labels_BT, row_chunks)
        return int(np.count_nonzero(host_labels_BT != IGNORED_LABEL))


NO_PARALLEL_HOOKS = ParallelHooks()
"""Hooks of a decoder on one rank."""
