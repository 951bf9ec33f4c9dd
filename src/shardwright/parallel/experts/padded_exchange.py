"""Expert parallelism with exchanges whose sizes do not depend on the choices of experts.

Every pair of ranks exchanges the same number of rows, so no size is read on the host. The numbers
of rows of each expert stay on the device. The experts compute only rows of tokens: rows of padding
follow those of the last expert, and what is in them reaches neither a token nor a gradient.

A rank that has more rows for another than this limit omits the others and counts them. The training
loop then repeats the step within `exchange_exactly` (docs/decisions/0176).

Legend: P ranks of ep, E experts, e experts of one rank and one entry for padding, X rows of the
buffer, N tokens, K experts per token, M = N x K choices, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.architecture import ExpertShape
from shardwright.model.communication_results import keep_statistic
from shardwright.model.decoder import Decoder
from shardwright.model.products.row_places import RowPlaces, place_rows, take_rows
from shardwright.model.routing import Routing
from shardwright.parallel.experts import row_exchange
from shardwright.parallel.experts.expert_parallel import ExchangedCounts, TokenDispatcher
from shardwright.parallel.experts.row_exchange import TracedCounts
from shardwright.plans import Plan

_GROWTH = 1.5
"""Factor by which the limit is raised."""


class PaddedExchange:
    """`model.parallel_hooks.TokenExchangeHooks` of `expert_dispatch: padded`.

    The dispatcher exchanges rows exactly within `exchange_exactly` and outside training steps.
    """

    def __init__(
        self, dispatcher: TokenDispatcher, experts: ExpertShape, num_tokens: int, limit: float
    ) -> None:
        """
        Args:
            num_tokens: tokens of a full micro-batch on each rank; the limit of all follows from it.
            limit: `layout.expert_row_limit`.
        """
        self.limit = limit
        self._dispatcher = dispatcher
        self._experts = experts
        self._num_tokens = num_tokens
        self._is_exact = False

    @property
    def rows_per_rank(self) -> int | None:
        """Rows that are exchanged with each rank, padding included; None if exactly those that
        there are."""
        if self._is_exact:
            return None
        return self._experts.count_row_limit(self._num_tokens, self._dispatcher.degree, self.limit)

    @contextmanager
    def exchange_exactly(self) -> Iterator[None]:
        """Exchange exactly the rows that there are, as `TokenDispatcher` does."""
        self._is_exact = True
        try:
            yield
        finally:
            self._is_exact = False

    def raise_limit(self) -> bool:
        """Raise the limit; return False if it already suffices for every choice of experts.

        Identical on all ranks of a run, or their buffers differ.
        """
        before = self.rows_per_rank
        self.limit *= _GROWTH
        return self.rows_per_rank != before

    def place_rows(self, experts_NK: Tensor, counts_E: Tensor) -> RowPlaces | None:
        """Place the rows of a training step's choices; None within `exchange_exactly`."""
        rows_per_rank = self.rows_per_rank
        if rows_per_rank is None:
            return None
        return place_rows(experts_NK, counts_E, self._dispatcher.degree, rows_per_rank)

    def accepts(self, routing: Routing) -> bool:
        """Return True for rows that have places."""
        return routing.places is not None

    def run_experts(
        self,
        experts: Callable[[Tensor, Tensor], Tensor],
        x_ND: Tensor,
        routing: Routing,
        overlapped_compute: Callable[[], Tensor] | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the weighted sum of each token's experts, `[N, D]`, and `overlapped_compute`'s
        result, which runs while rows are sent.
        """
        assert routing.places is not None
        choices_X, places_M, counts_Pe, _ = routing.places
        weights_NK = routing.weights_NK
        counts = self._exchange_counts(counts_Pe)
        finish = self._dispatcher.start_dispatch(
            take_rows(x_ND, choices_X, places_M, weights_NK.shape[1]), counts
        )
        overlapped = None if overlapped_compute is None else overlapped_compute()
        dispatched = finish()
        del finish  # it refers to the rows as received
        finish_return = self._dispatcher.start_combine(
            experts(dispatched.rows_RD, dispatched.counts_e), dispatched
        )
        out_MD = take_rows(finish_return(), places_M, choices_X, 1)
        del finish_return
        out_NKD = out_MD.unflatten(0, tuple(weights_NK.shape))
        return (weights_NK.to(x_ND.dtype).unsqueeze(1) @ out_NKD).squeeze(1), overlapped

    def _exchange_counts(self, counts_Pe: Tensor) -> ExchangedCounts | TracedCounts:
        """Exchange the numbers of rows of each expert, of which the host reads none."""
        rows_per_rank = self.rows_per_rank
        group = self._dispatcher.group
        assert rows_per_rank is not None
        assert group is not None
        degree = self._dispatcher.degree
        name = self._dispatcher.group_name
        if torch.compiler.is_compiling():
            host_counts_2P = torch.full((2, degree), rows_per_rank, device="cpu")
            received_Pe = _exchange_padded_counts(counts_Pe, name)
            return _TracedPaddedCounts(received_Pe, host_counts_2P, name, rows_per_rank)
        received_Pe = keep_statistic(partial(_exchange_counts, counts_Pe, group))
        equal = [rows_per_rank] * degree
        return ExchangedCounts(received_Pe, equal, equal)


def _exchange_counts(counts_Pe: Tensor, group: dist.ProcessGroup) -> Tensor:
    return row_exchange.exchange_equal_parts(counts_Pe[None], group)[0]


@dataclass(frozen=True)
class _TracedPaddedCounts(TracedCounts):
    """`TracedCounts` whose sizes are known when the graph is traced."""

    rows_per_rank: int

    def sort_received(self) -> Tensor:
        """Return the order of the received rows that sorts them by expert, `[X]`."""
        num_rows = self.received_Pe.shape[0] * self.rows_per_rank
        return row_exchange.sort_by_expert(self.received_Pe, num_rows)


@torch.library.custom_op(
    "shardwright::exchange_padded_counts",
    mutates_args=(),
    schema="(Tensor counts, str group) -> Tensor",
)
def _exchange_padded_counts(counts_Pe: Tensor, group_name: str) -> Tensor:
    return _exchange_counts(counts_Pe, row_exchange.get_group(group_name))


@_exchange_padded_counts.register_fake
def _fake_exchange_padded_counts(counts_Pe: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(counts_Pe)


def build_padded_exchange(
    plan: Plan, group: dist.ProcessGroup, experts: ExpertShape
) -> PaddedExchange:
    """Build the exchange of `expert_dispatch: padded` over the ranks of `ep`."""
    num_tokens = plan.batch.micro_batch_size * plan.batch.sequence_length // plan.layout.cp
    dispatcher = TokenDispatcher(group, None, plan.layout.tp)
    return PaddedExchange(dispatcher, experts, num_tokens, plan.layout.expert_row_limit)


def find_padded_exchange(decoder: Decoder) -> PaddedExchange | None:
    """Return a decoder's padded exchange; None if it has another."""
    exchange = decoder.parallel_hooks.token_exchange
    return exchange if isinstance(exchange, PaddedExchange) else None
