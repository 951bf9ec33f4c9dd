"""Expert parallelism: exchange of token rows with the ranks that hold their experts.

Nothing is dropped or padded: ranks first exchange how many rows go where (which makes the host
wait, once per layer), then exactly those rows. The ranks of `ep` are neighbours on dp_shard x
cp; each holds experts / ep of them, whole or, with tensor parallelism, its share of every
expert's features.

An exchange is two nodes of the autograd graph, one that starts it and one that waits for it, so
that other work runs between them in both directions: shared experts while rows are sent to the
experts, the gradient of shared experts while the gradients of the rows are sent back. Every
rank takes part in every exchange, forward and backward, even with no row to send, because the
others would wait for it. Gradients arrive summed over the ranks that sent the rows, so no
gradient of an expert is summed over `ep`. Compiled code uses the operators of `row_exchange`
instead of the autograd functions here.

Legend: H parts of the tokens, E experts, e experts of one rank, P ranks of ep, M rows sent, R rows
received, X rows either way, D hidden, B rows of tokens, L tokens of this context rank, T tokens of
a row, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shardwright.architecture import ModelShape
from shardwright.layout import Layout
from shardwright.model.communication_results import keep_statistic
from shardwright.model.products.grouped_matmul import take_first
from shardwright.parallel.comm_timing import time_wait
from shardwright.parallel.direct_collectives import all_gather_single
from shardwright.parallel.experts import row_exchange
from shardwright.parallel.experts.row_exchange import TracedCounts
from shardwright.parallel.mesh import Mesh


def build_token_dispatcher(
    shape: ModelShape, layout: Layout, mesh: Mesh | None
) -> TokenDispatcher | None:
    """Build the token dispatcher of a sparse model; None if no rank needs data of another."""
    if mesh is None or shape.experts is None or layout.ep == layout.cp == layout.tp == 1:
        return None
    num_parts = 2 if layout.expert_dispatch == "halves" else 1
    return TokenDispatcher(mesh.group("ep"), mesh.group("cp"), layout.tp, num_parts)


@dataclass
class _AllToAllExchange:
    """Exchange of rows with the other ranks: row counts and pending communication.

    Attributes:
        send: rows sent to each rank.
        receive: rows received from each rank.
        work: pending exchange of the forward pass.
        back: pending exchange of the backward pass.
        gradient: gradient of the sent rows, filled by `backward_work`.
    """

    group: dist.ProcessGroup
    send_counts: list[int]
    receive_counts: list[int]
    forward_work: Any = None
    backward_work: Any = None
    gradient: Tensor | None = None


@dataclass(frozen=True)
class ExchangedCounts:
    """Numbers of rows that an exchange sends to and receives from each rank.

    Attributes:
        received_Pe: rows of each of this rank's experts, by the rank that sends them.
    """

    received_Pe: Tensor
    send: list[int]
    receive: list[int]


@dataclass(frozen=True)
class AllToAllDispatch:
    """Rows on the ranks of their experts."""

    rows_RD: Tensor
    """Rows sorted by expert."""
    counts_e: Tensor
    """Rows of each expert on this rank."""
    order_R: Tensor = field(repr=False)
    """Index, in order of arrival, of each sorted row."""
    counts: ExchangedCounts | TracedCounts
    num_sent_rows: int


class TokenDispatcher:
    """`model.parallel_hooks.ExpertParallelHooks` over the ranks of `ep`.

    With one such rank only statistics are exchanged, between the ranks that share a row.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        row_group: dist.ProcessGroup | None,
        tensor_degree: int,
        num_parts: int = 1,
    ) -> None:
        self.group = group
        self.group_name = "" if group is None else row_exchange.register_group(group)
        self.row_group = row_group
        self.degree = 1 if group is None else group.size()
        self.rank = 0 if group is None else dist.get_rank(group)
        self.num_parts = num_parts
        self.num_row_ranks = 1 if row_group is None else row_group.size()
        self.loss_share = 1.0 / tensor_degree

    def exchange_counts(
        self, counts_HE: Tensor, num_choices: Sequence[int]
    ) -> Sequence[ExchangedCounts | TracedCounts]:
        """Exchange each part's numbers of rows of each expert; the host waits for them.

        `num_choices` are the sums over experts if no choice was dropped.
        """
        if torch.compiler.is_compiling():
            return row_exchange.exchange_traced_counts(counts_HE, self.group_name)
        return keep_statistic(partial(self._exchange_counts, counts_HE, num_choices))

    def _exchange_counts(
        self, counts_HE: Tensor, num_choices: Sequence[int]
    ) -> list[ExchangedCounts]:
        assert self.group is not None
        sent_HPe = counts_HE.unflatten(1, (self.degree, -1))
        received_HPe = row_exchange.exchange_equal_parts(sent_HPe, self.group)
        host_counts = read_row_counts(sent_HPe, received_HPe, num_choices)
        return [
            ExchangedCounts(received_Pe, send, receive)
            for received_Pe, (send, receive) in zip(received_HPe, host_counts, strict=True)
        ]

    def keep_sent_slots(self, slots_M: Tensor, counts: ExchangedCounts | TracedCounts) -> Tensor:
        """Return the slots of the rows to send, the first ones; the others are dropped choices."""
        if isinstance(counts, TracedCounts):
            return take_first(slots_M, counts.host_counts_2P[0].sum())
        return slots_M[: sum(counts.send)]

    def start_dispatch(
        self, rows_MD: Tensor, counts: ExchangedCounts | TracedCounts
    ) -> Callable[[], AllToAllDispatch]:
        """Start to send rows, sorted by expert, to the experts' ranks; return the function that
        waits for them.
        """
        num_rows = rows_MD.shape[0]
        finish: Callable[[], Tensor]
        if isinstance(counts, TracedCounts):
            ticket = counts.start(rows_MD)
            order_R = counts.sort_received()
            finish = partial(counts.finish, ticket, order_R, order_R.shape[0], rows_MD)
        else:
            finish_exchange = self._start_exchange(rows_MD, counts.send, counts.receive)
            order_R = row_exchange.sort_by_expert(counts.received_Pe, sum(counts.receive))
            finish = lambda: _Reorder.apply(finish_exchange(), order_R)  # noqa: E731
        return lambda: AllToAllDispatch(
            finish(), counts.received_Pe.sum(0), order_R, counts, num_rows
        )

    def start_combine(self, out_RD: Tensor, dispatched: AllToAllDispatch) -> Callable[[], Tensor]:
        """Start to return the experts' outputs to the rows' ranks; return the function that waits
        for them, `[M, D]` in the original order.
        """
        counts = dispatched.counts
        if isinstance(counts, TracedCounts):
            ticket = counts.start(out_RD, dispatched.order_R)
            return partial(counts.finish, ticket, None, dispatched.num_sent_rows, out_RD)
        unsorted_RD = _Reorder.apply(out_RD, row_exchange.invert_order(dispatched.order_R))
        return self._start_exchange(unsorted_RD, counts.receive, counts.send)

    def _start_exchange(
        self, rows_XD: Tensor, send: list[int], receive: list[int]
    ) -> Callable[[], Tensor]:
        assert self.group is not None
        return start_exchange(rows_XD, send, receive, self.group)

    def sum_over_row(self, x: Tensor) -> Tensor:
        """Sum `x` in place over the ranks that share a row's tokens, without gradient."""
        return x if self.row_group is None else keep_statistic(partial(self._sum_over_row, x))

    def _sum_over_row(self, x: Tensor) -> Tensor:
        assert self.row_group is not None
        with time_wait(self.row_group):
            dist.all_reduce(x, group=self.row_group)
        return x

    def gather_row(self, experts_BLK: Tensor, token_indices_L: Tensor | None) -> Tensor:
        """Gather the expert choices of whole rows, `[B, T, K]`, without gradient.

        This rank has the choices of the tokens at positions `token_indices_L`.
        """
        if self.row_group is None or token_indices_L is None:
            return experts_BLK
        return keep_statistic(partial(self._gather_row, experts_BLK, token_indices_L))

    def _gather_row(self, experts_BLK: Tensor, token_indices_L: Tensor) -> Tensor:
        assert self.row_group is not None
        size = self.row_group.size()
        parts = experts_BLK.new_empty(size, *experts_BLK.shape)
        places = token_indices_L.new_empty(size, *token_indices_L.shape)
        with time_wait(self.row_group):
            all_gather_single(parts.flatten(0, 1), experts_BLK.contiguous(), group=self.row_group)
            all_gather_single(places.flatten(), token_indices_L.contiguous(), group=self.row_group)
        row_BTK = torch.empty_like(parts.transpose(0, 1).flatten(1, 2))
        row_BTK[:, places.flatten()] = parts.transpose(0, 1).flatten(1, 2)
        return row_BTK


def start_exchange(
    rows_XD: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
) -> Callable[[], Tensor]:
    """Start to exchange rows outside compiled code; return the function that waits for them."""
    exchange = _AllToAllExchange(group, send, receive)
    return partial(_AllToAllFinish.apply, _AllToAllStart.apply(rows_XD, exchange), exchange)


def read_row_counts(
    sent_HPe: Tensor, received_HPe: Tensor, num_rows: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """Read on the host how many rows of each part go to and come from each rank.

    A rehearsal's fake tensors hold no numbers: loads are then even.
    """
    if not isinstance(sent_HPe, FakeTensor):
        return row_exchange.read_row_counts(sent_HPe, received_HPe)
    degree = sent_HPe.shape[1]
    counts = []
    for total in num_rows:
        even = [total * (rank + 1) // degree - total * rank // degree for rank in range(degree)]
        counts.append((even, [even[0]] * degree))
    return counts


class _Reorder(torch.autograd.Function):
    """Rows in another order. Indexing's own backward pass would add up the rows one by one."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, order_R: Tensor) -> Tensor:
        ctx.save_for_backward(order_R)
        return x_RD.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (order_R,) = ctx.saved_tensors
        return gradients[0].index_select(0, row_exchange.invert_order(order_R)), None


class _AllToAllStart(torch.autograd.Function):
    """Start sending rows. Backward: wait for the gradients whose sending `_AllToAllFinish`
    started.
    """

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, exchange: _AllToAllExchange) -> Tensor:
        ctx.exchange = exchange
        received_RD = x_MD.new_empty(sum(exchange.receive_counts), x_MD.shape[1])
        exchange.forward_work = row_exchange.start_all_to_all(
            received_RD,
            x_MD.contiguous(),
            exchange.receive_counts,
            exchange.send_counts,
            exchange.group,
        )
        return received_RD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        exchange: _AllToAllExchange = ctx.exchange
        row_exchange.wait_all_to_all(exchange.backward_work)
        gradient_MD = exchange.gradient
        exchange.gradient = None
        exchange.backward_work = None
        assert gradient_MD is not None
        return gradient_MD, None


class _AllToAllFinish(torch.autograd.Function):
    """Wait for the rows. Backward: start sending their gradients; its result is a placeholder."""

    @staticmethod
    def forward(ctx: Any, pending_RD: Tensor, exchange: _AllToAllExchange) -> Tensor:
        ctx.exchange = exchange
        row_exchange.wait_all_to_all(exchange.forward_work)
        exchange.forward_work = None
        return pending_RD.view_as(pending_RD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        exchange: _AllToAllExchange = ctx.exchange
        gradient_RD = gradients[0].contiguous()
        exchange.gradient = gradient_RD.new_empty(sum(exchange.send_counts), gradient_RD.shape[1])
        exchange.backward_work = row_exchange.start_all_to_all(
            exchange.gradient,
            gradient_RD,
            exchange.send_counts,
            exchange.receive_counts,
            exchange.group,
        )
        return gradient_RD, None
