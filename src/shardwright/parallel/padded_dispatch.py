"""Expert parallelism with exchanges whose sizes do not depend on the choices of experts.

Every pair of ranks exchanges the same number of rows, so no size is read on the host. The numbers
of rows of each expert stay on the device. The experts compute only rows of tokens: rows of padding
follow those of the last expert, and what is in them reaches neither a token nor a gradient.

A rank that has more rows for another than this limit omits the others and counts them. The training
loop then repeats the step within `exchange_exactly` (docs/decisions/0176).

Legend: P ranks of ep, e experts of one rank and one entry for padding, X rows of the buffer, D
hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.architecture import ExpertShape
from shardwright.model.communication_results import keep_statistic
from shardwright.model.decoder import Decoder
from shardwright.parallel import row_exchange
from shardwright.parallel.expert_parallel import (
    ExchangedCounts,
    TokenDispatcher,
    build_token_dispatcher,
)
from shardwright.parallel.mesh import Mesh
from shardwright.parallel.row_exchange import TracedCounts
from shardwright.plans import Plan

_GROWTH = 1.5
"""Factor by which the limit is raised."""


class PaddedTokenDispatcher(TokenDispatcher):
    """`TokenDispatcher` whose exchanges are padded, except within `exchange_exactly`."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        row_group: dist.ProcessGroup | None,
        tensor_degree: int,
        experts: ExpertShape,
        num_tokens: int,
        limit: float,
    ) -> None:
        """
        Args:
            num_tokens: tokens of a full micro-batch on each rank; the limit of all follows from it.
            limit: `layout.expert_row_limit`.
        """
        super().__init__(group, row_group, tensor_degree)
        self.limit = limit
        self._experts = experts
        self._num_tokens = num_tokens
        self._is_exact = False
        self._count_rows()

    def _count_rows(self) -> None:
        rows = self._experts.count_row_limit(self._num_tokens, self.degree, self.limit)
        self.rows_per_rank = None if self._is_exact else rows

    @contextmanager
    def exchange_exactly(self) -> Iterator[None]:
        """Exchange exactly the rows that there are, as `TokenDispatcher` does."""
        self._is_exact = True
        self._count_rows()
        try:
            yield
        finally:
            self._is_exact = False
            self._count_rows()

    def raise_limit(self) -> bool:
        """Raise the limit; return False if it already suffices for every choice of experts.

        Identical on all ranks of a run, or their buffers differ.
        """
        before = self.rows_per_rank
        self.limit *= _GROWTH
        self._count_rows()
        return self.rows_per_rank != before

    def exchange_padded_counts(self, counts_Pe: Tensor) -> ExchangedCounts | TracedCounts:
        """Exchange the numbers of rows of each expert, of which the host reads none."""
        rows_per_rank = self.rows_per_rank
        assert rows_per_rank is not None
        if torch.compiler.is_compiling():
            host_counts_2P = torch.full((2, self.degree), rows_per_rank, device="cpu")
            received_Pe = _exchange_padded_counts(counts_Pe, self.group_name)
            return _TracedPaddedCounts(received_Pe, host_counts_2P, self.group_name, rows_per_rank)
        assert self.group is not None
        received_Pe = keep_statistic(partial(_exchange_counts, counts_Pe, self.group))
        equal = [rows_per_rank] * self.degree
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


def build_expert_hooks(plan: Plan, mesh: Mesh | None) -> TokenDispatcher | None:
    """Build the token dispatcher of a plan; None if no rank needs data of another."""
    layout = plan.layout
    experts = plan.shape.experts
    if layout.expert_dispatch != "padded" or layout.ep == 1 or experts is None or mesh is None:
        return build_token_dispatcher(plan.shape, layout, mesh)
    group = mesh.group("ep")
    assert group is not None
    num_tokens = plan.batch.micro_batch_size * plan.batch.sequence_length // layout.cp
    return PaddedTokenDispatcher(
        group, mesh.group("cp"), layout.tp, experts, num_tokens, layout.expert_row_limit
    )


def find_padded_dispatcher(decoder: Decoder) -> PaddedTokenDispatcher | None:
    """Return the dispatcher of a decoder's padded exchanges; None if it has none."""
    dispatcher = decoder.parallel_hooks.expert
    return dispatcher if isinstance(dispatcher, PaddedTokenDispatcher) else None
