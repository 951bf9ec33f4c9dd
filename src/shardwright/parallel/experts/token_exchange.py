"""Expert parallelism that sends a token once to each rank with at least one of its experts.

Ranks first exchange how many rows and choices go where (the host waits for the numbers once), and
the place of each choice's row. Then each token's row goes once to each rank that needs it, with
the router's weights of its choices there. That rank copies the row for each of its experts,
computes them, and returns one weighted sum. The token's rank adds the sums of its ranks. Tokens
that choose several experts of one rank cost one row on the wire instead of several.

All index tensors are computed once per micro-batch; recomputation takes them from the forward
pass. Exchanges of rows are those of `expert_parallel` and, in compiled code, of `row_exchange`.

Legend: P ranks of ep, E experts, e experts of one rank, N tokens, K experts per token, M choices
sent, R choices received, S rows sent, V rows received, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.architecture import ExpertShape
from shardwright.model.communication_results import keep_statistic
from shardwright.model.parallel_hooks import TokenExchangeHooks
from shardwright.model.products.row_copies import RowCopies, copy_rows, map_copies, sum_copies
from shardwright.model.routing import Routing, count_tokens
from shardwright.numerics.precision import resolve_dtypes
from shardwright.parallel.experts import row_exchange
from shardwright.parallel.experts.deep_ep_exchange import DeepEPExchange
from shardwright.parallel.experts.expert_parallel import read_row_counts, start_exchange
from shardwright.parallel.experts.padded_exchange import build_padded_exchange
from shardwright.parallel.experts.row_exchange import TracedCounts
from shardwright.parallel.mesh import Mesh
from shardwright.plans import Plan

RowCounts = tuple[list[int], list[int]]
"""Rows sent to and received from each rank."""


def build_token_exchange(plan: Plan, mesh: Mesh | None) -> TokenExchangeHooks | None:
    """Build the exchange of `layout.expert_dispatch`; None if it is that of `TokenDispatcher`."""
    experts = plan.shape.experts
    group = None if mesh is None or experts is None else mesh.group("ep")
    if experts is None or group is None:
        return None
    if plan.layout.expert_dispatch == "padded":
        return build_padded_exchange(plan, group, experts)
    if plan.layout.expert_dispatch == "deep_ep":
        row_bytes = plan.shape.hidden_size * resolve_dtypes(plan.precision).compute.itemsize
        return DeepEPExchange(group, experts, row_bytes)
    return TokenExchange(group, experts) if plan.layout.expert_dispatch == "once_per_rank" else None


class _Indices(NamedTuple):
    """Index tensors of an exchange, in int32."""

    counts_e: Tensor
    """Choices of each expert of this rank."""
    slots_M: Tensor
    """Choices sent, as indices of `[N, K]`, sorted by expert."""
    order_R: Tensor
    """Choices received, as indices in the order of arrival, sorted by expert."""
    sent: RowCopies
    """Rows that are sent, as copies of the tokens."""
    received: RowCopies
    """Rows of the experts, as copies of the rows received."""


class TokenExchange:
    """`model.parallel_hooks.TokenExchangeHooks` over the ranks of `ep`."""

    def __init__(self, group: dist.ProcessGroup, shape: ExpertShape) -> None:
        self.group = group
        self.group_name = row_exchange.register_group(group)
        self.shape = shape

    def place_rows(self, experts_NK: Tensor, counts_E: Tensor) -> None:
        """Return None: these exchanges have no padding."""

    def accepts(self, routing: Routing) -> bool:
        """Return True: no row is left to `ExpertParallelHooks`."""
        return True

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
        choices, rows, indices = self._plan(routing.experts_NK)
        num_sent = indices.sent.source_M.shape[0]
        num_received = indices.received.starts_N.shape[0]
        weights_NK = routing.weights_NK.to(x_ND.dtype)
        weights_M1 = weights_NK.flatten().index_select(0, indices.slots_M).unsqueeze(1)
        finish_weights = self._start(weights_M1, choices, indices.order_R.shape[0])
        finish_rows = self._start(copy_rows(x_ND, indices.sent), rows, num_received)
        overlapped = None if overlapped_compute is None else overlapped_compute()
        weights_R = finish_weights().flatten().index_select(0, indices.order_R)
        rows_RD = copy_rows(finish_rows(), indices.received)
        del finish_rows  # it refers to the rows as received
        out_RD = experts(rows_RD, indices.counts_e)
        sums_VD = sum_copies(out_RD, indices.received, weights_R)
        finish_sums = self._start(sums_VD, rows, num_sent, is_return=True)
        return sum_copies(finish_sums(), indices.sent), overlapped

    def _start(
        self,
        rows_XD: Tensor,
        counts: RowCounts | Tensor,
        num_received: int,
        *,
        is_return: bool = False,
    ) -> Callable[[], Tensor]:
        """Start to send rows, or to return them; return the function that waits for the others."""
        if isinstance(counts, Tensor):
            # The operator that finishes an exchange starts that of the gradients, the other way.
            ways = [
                TracedCounts(counts, each, self.group_name) for each in (counts, counts.flip(0))
            ]
            there, back = reversed(ways) if is_return else ways
            return partial(back.finish, there.start(rows_XD), None, num_received, rows_XD)
        send, receive = reversed(counts) if is_return else counts
        return start_exchange(rows_XD, send, receive, self.group)

    def _plan(self, experts_NK: Tensor) -> tuple[RowCounts | Tensor, RowCounts | Tensor, _Indices]:
        """Exchange what ranks must know before they send rows; the host waits for the numbers.

        Returns:
            Numbers of choices, numbers of rows, and indices. In compiled code the numbers are
            tensors `[2, P]` in host memory.
        """
        num_experts = self.shape.num_experts
        if torch.compiler.is_compiling():
            host_counts_22P, *tensors = _plan_traced(experts_NK, num_experts, self.group_name)
            return host_counts_22P[0], host_counts_22P[1], _unflatten_indices(tensors)
        num_rows = experts_NK.shape[0] * self.shape.count_reached_ranks(self.group.size())
        even_loads = (experts_NK.numel(), round(num_rows))
        return keep_statistic(
            partial(_plan_exchange, experts_NK, num_experts, self.group, even_loads)
        )


def _plan_exchange(
    experts_NK: Tensor, num_experts: int, group: dist.ProcessGroup, even_loads: tuple[int, int]
) -> tuple[RowCounts, RowCounts, _Indices]:
    """Compute the indices of an exchange, with the numbers of choices and of rows.

    `even_loads` are the numbers of choices and of rows that a rehearsal assumes.
    """
    num_tokens, _ = experts_NK.shape
    degree = group.size()
    counts_Pe = count_tokens(experts_NK, num_experts).unflatten(0, (degree, -1))
    ranks_NK = experts_NK // counts_Pe.shape[1]  # `degree` for a dropped choice
    is_sent_NP = ranks_NK.new_zeros(num_tokens, degree + 1).scatter_(1, ranks_NK, 1)[:, :degree]
    rows_Pe = torch.zeros_like(counts_Pe)
    rows_Pe[:, 0] = is_sent_NP.sum(0)
    sent_2Pe = torch.stack([counts_Pe, rows_Pe])
    received_2Pe = row_exchange.exchange_equal_parts(sent_2Pe, group)
    choices, rows = read_row_counts(sent_2Pe, received_2Pe, even_loads)

    slots_M = experts_NK.flatten().argsort(stable=True)[: sum(choices[0])]
    pairs_S = is_sent_NP.t().flatten().argsort(descending=True, stable=True)[: sum(rows[0])]
    # A rank's rows and the choices of one of its experts are sent in the order of the tokens. A
    # choice finds its row by the place among the rows of its sender.
    places_NP = is_sent_NP.cumsum(0) - 1
    places_NK = places_NP.gather(1, ranks_NK.clamp(max=degree - 1))
    source_R, order_R = _exchange_places(
        places_NK.flatten()[slots_M].to(torch.int32), choices, received_2Pe, group
    )
    indices = _Indices(
        received_2Pe[0].sum(0),
        slots_M.to(torch.int32),
        order_R.to(torch.int32),
        map_copies(pairs_S % num_tokens, num_tokens),
        map_copies(source_R, sum(rows[1])),
    )
    return choices, rows, indices


def _exchange_places(
    places_M: Tensor, choices: RowCounts, received_2Pe: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return the received row of each received choice, and the order that sorts choices by expert;
    the first result is in that order.
    """
    send, receive = choices
    places_R = places_M.new_empty(sum(receive))
    work = row_exchange.start_all_to_all(places_R, places_M, receive, send, group)
    order_R = row_exchange.sort_by_expert(received_2Pe[0], places_R.shape[0])
    rows_P = received_2Pe[1, :, 0]
    firsts_R = (rows_P.cumsum(0) - rows_P).repeat_interleave(
        received_2Pe[0].sum(1), output_size=places_R.shape[0]
    )
    row_exchange.wait_all_to_all(work)
    return (places_R + firsts_R)[order_R], order_R


def _unflatten_indices(tensors: Sequence[Tensor]) -> _Indices:
    counts_e, slots_M, order_R, *copies = tensors
    return _Indices(counts_e, slots_M, order_R, RowCopies(*copies[:3]), RowCopies(*copies[3:]))


@torch.library.custom_op(
    "shardwright::plan_token_exchange",
    mutates_args=(),
    schema="(Tensor experts, int num_experts, str group) -> (" + ", ".join(["Tensor"] * 10) + ")",
)
def _plan_traced(experts_NK: Tensor, num_experts: int, group_name: str) -> tuple[Tensor, ...]:
    group = row_exchange.get_group(group_name)
    *counts, indices = _plan_exchange(experts_NK, num_experts, group, (0, 0))
    return torch.tensor(counts), *indices[:3], *indices.sent, *indices.received


@_plan_traced.register_fake
def _fake_plan(experts_NK: Tensor, num_experts: int, group_name: str) -> tuple[Tensor, ...]:
    degree = row_exchange.get_group(group_name).size()
    context = torch.library.get_ctx()
    size_M, size_S, size_R, size_V = (context.new_dynamic_size() for _ in range(4))
    sizes = (size_M, size_R, size_S, size_S, experts_NK.shape[0], size_R, size_R, size_V)
    return (
        torch.empty(2, 2, degree, dtype=torch.int64, device="cpu"),
        experts_NK.new_empty(num_experts // degree),
        *(experts_NK.new_empty(size, dtype=torch.int32) for size in sizes),
    )
