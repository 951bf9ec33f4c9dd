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
gradient of an expert is summed over `ep`.

Legend: E experts, e experts of one rank, P ranks of ep, M rows sent, R rows received, D hidden,
B rows of tokens, L tokens of this context rank, T tokens of a row, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shardwright.architecture import ModelShape
from shardwright.layout import Layout
from shardwright.parallel.collectives import all_gather_single
from shardwright.parallel.comm_timing import time_wait
from shardwright.parallel.mesh import Mesh


def build_token_dispatcher(
    shape: ModelShape, layout: Layout, mesh: Mesh | None
) -> TokenDispatcher | None:
    """Build the token dispatcher of a sparse model; None if no rank needs data of another."""
    if mesh is None or shape.experts is None or layout.ep == layout.cp == layout.tp == 1:
        return None
    return TokenDispatcher(mesh.group("ep"), mesh.group("cp"), layout.tp)


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
class AllToAllDispatch:
    """Rows on the ranks of their experts."""

    rows_RD: Tensor
    """Rows sorted by expert."""
    counts_e: Tensor
    """Rows of each expert on this rank."""
    order_R: Tensor = field(repr=False)
    """Index, in order of arrival, of each sorted row."""
    send_counts: list[int]
    receive_counts: list[int]
    overlapped_output: Tensor | None
    """Result of the computation that overlapped the exchange."""


class TokenDispatcher:
    """`model.parallel_hooks.ExpertParallelHooks` over the ranks of `ep`.

    With one such rank only statistics are exchanged, between the ranks that share a row.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        row_group: dist.ProcessGroup | None,
        tensor_degree: int,
    ) -> None:
        self.group = group
        self.row_group = row_group
        self.degree = 1 if group is None else group.size()
        self.rank = 0 if group is None else dist.get_rank(group)
        self.num_row_ranks = 1 if row_group is None else row_group.size()
        self.loss_share = 1.0 / tensor_degree

    def dispatch(
        self, rows_MD: Tensor, counts_E: Tensor, overlapped_compute: Callable[[], Tensor] | None
    ) -> AllToAllDispatch:
        """Send rows, sorted by expert, to the experts' ranks; `overlapped_compute` runs before the
        wait.
        """
        assert self.group is not None
        sent_Pe = counts_E.view(self.degree, -1).contiguous()
        received_Pe = torch.empty_like(sent_Pe)
        with time_wait("expert"):
            dist.all_to_all_single(received_Pe, sent_Pe, group=self.group)
        send, receive = _read_row_counts(sent_Pe, received_Pe, rows_MD.shape[0])
        exchange = _AllToAllExchange(self.group, send, receive)
        pending_RD = _StartAllToAll.apply(rows_MD, exchange)
        overlapped_output = None if overlapped_compute is None else overlapped_compute()
        received_RD = _FinishAllToAll.apply(pending_RD, exchange)
        # Rows arrive rank by rank, those of each rank sorted by expert; sort all of them by
        # expert.
        local_experts_e = torch.arange(received_Pe.shape[1], device=counts_E.device)
        expert_of_R = local_experts_e.repeat(self.degree).repeat_interleave(
            received_Pe.flatten(), output_size=sum(receive)
        )
        order_R = expert_of_R.argsort(stable=True)
        return AllToAllDispatch(
            _Reorder.apply(received_RD, order_R),
            received_Pe.sum(0),
            order_R,
            send,
            receive,
            overlapped_output,
        )

    def combine(self, out_RD: Tensor, dispatched: AllToAllDispatch) -> Tensor:
        """Return the experts' outputs to the rows' ranks, in the original order, `[M, D]`."""
        assert self.group is not None
        received_order_RD = _Reorder.apply(out_RD, _invert_order(dispatched.order_R))
        exchange = _AllToAllExchange(self.group, dispatched.receive_counts, dispatched.send_counts)
        returned: Tensor = _FinishAllToAll.apply(
            _StartAllToAll.apply(received_order_RD, exchange), exchange
        )
        return returned

    def sum_over_row(self, x: Tensor) -> Tensor:
        """Sum `x` in place over the ranks that share a row's tokens, without gradient."""
        if self.row_group is not None:
            with time_wait(self.row_group):
                dist.all_reduce(x, group=self.row_group)
        return x

    def gather_row(self, experts_BLK: Tensor, token_indices_L: Tensor | None) -> Tensor:
        """Gather the expert choices of whole rows, `[B, T, K]`, without gradient.

        This rank has the choices of the tokens at positions `token_indices_L`.
        """
        if self.row_group is None or token_indices_L is None:
            return experts_BLK
        size = self.row_group.size()
        parts = experts_BLK.new_empty(size, *experts_BLK.shape)
        places = token_indices_L.new_empty(size, *token_indices_L.shape)
        with time_wait(self.row_group):
            all_gather_single(parts.flatten(0, 1), experts_BLK.contiguous(), group=self.row_group)
            all_gather_single(places.flatten(), token_indices_L.contiguous(), group=self.row_group)
        row_BTK = torch.empty_like(parts.transpose(0, 1).flatten(1, 2))
        row_BTK[:, places.flatten()] = parts.transpose(0, 1).flatten(1, 2)
        return row_BTK


def _read_row_counts(
    sent_Pe: Tensor, received_Pe: Tensor, num_rows: int
) -> tuple[list[int], list[int]]:
    """Read on the host how many rows go to and come from each rank.

    A rehearsal's fake tensors hold no numbers: loads are then even.
    """
    if isinstance(sent_Pe, FakeTensor):
        degree = sent_Pe.shape[0]
        even = [
            num_rows * (rank + 1) // degree - num_rows * rank // degree for rank in range(degree)
        ]
        return even, [even[0]] * degree
    send, receive = torch.stack([sent_Pe.sum(1), received_Pe.sum(1)]).tolist()
    return send, receive


def _invert_order(order_R: Tensor) -> Tensor:
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(order_R.shape[0], device=order_R.device)
    return inverse_R


class _Reorder(torch.autograd.Function):
    """Rows in another order. Indexing's own backward pass would add up the rows one by one."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, order_R: Tensor) -> Tensor:
        ctx.save_for_backward(order_R)
        return x_RD.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (order_R,) = ctx.saved_tensors
        return gradients[0].index_select(0, _invert_order(order_R)), None


class _StartAllToAll(torch.autograd.Function):
    """Start sending rows. Backward: wait for the gradients whose sending `_FinishAllToAll`
    started.
    """

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, exchange: _AllToAllExchange) -> Tensor:
        ctx.exchange = exchange
        received_RD = x_MD.new_empty(sum(exchange.receive_counts), x_MD.shape[1])
        exchange.forward_work = start_all_to_all(
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
        wait_all_to_all(exchange.backward_work)
        gradient_MD = exchange.gradient
        exchange.gradient = None
        exchange.backward_work = None
        assert gradient_MD is not None
        return gradient_MD, None


class _FinishAllToAll(torch.autograd.Function):
    """Wait for the rows. Backward: start sending their gradients; its result is a placeholder."""

    @staticmethod
    def forward(ctx: Any, pending_RD: Tensor, exchange: _AllToAllExchange) -> Tensor:
        ctx.exchange = exchange
        wait_all_to_all(exchange.forward_work)
        exchange.forward_work = None
        return pending_RD.view_as(pending_RD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        exchange: _AllToAllExchange = ctx.exchange
        gradient_RD = gradients[0].contiguous()
        exchange.gradient = gradient_RD.new_empty(sum(exchange.send_counts), gradient_RD.shape[1])
        exchange.backward_work = start_all_to_all(
            exchange.gradient,
            gradient_RD,
            exchange.send_counts,
            exchange.receive_counts,
            exchange.group,
        )
        return gradient_RD, None


def start_all_to_all(
    output: Tensor, rows: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup
) -> Any:
    """Start an exchange of rows that `wait_all_to_all` ends.

    It is a separate function so that tests can observe the order.
    """
    return dist.all_to_all_single(output, rows, receive, send, group=group, async_op=True)


def wait_all_to_all(work: Any) -> None:
    """Wait for an exchange that `start_all_to_all` started."""
    with time_wait("expert"):
        work.wait()
