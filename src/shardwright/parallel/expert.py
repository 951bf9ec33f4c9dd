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
from shardwright.parallel.mesh import Mesh
from shardwright.parallel.waiting import waiting


def expert_cut(shape: ModelShape, layout: Layout, mesh: Mesh | None) -> ExpertExchange | None:
    """Build the token dispatcher of a sparse model; None if no rank needs data of another."""
    if mesh is None or shape.experts is None or layout.ep == layout.cp == layout.tp == 1:
        return None
    return ExpertExchange(mesh.group("ep"), mesh.group("cp"), layout.tp)


@dataclass
class _Journey:
    """Exchange of rows with the other ranks: row counts and pending communication.

    Attributes:
        send: rows sent to each rank.
        receive: rows received from each rank.
        work: pending exchange of the forward pass.
        back: pending exchange of the backward pass.
        gradient: gradient of the sent rows, filled by `back`.
    """

    group: dist.ProcessGroup
    send: list[int]
    receive: list[int]
    work: Any = None
    back: Any = None
    gradient: Tensor | None = None


@dataclass(frozen=True)
class Arrived:
    """Rows on the ranks of their experts."""

    rows_RD: Tensor
    """Rows sorted by expert."""
    counts_e: Tensor
    """Rows of each expert on this rank."""
    order_R: Tensor = field(repr=False)
    """Index, in order of arrival, of each sorted row."""
    send: list[int]
    receive: list[int]
    meanwhile: Tensor | None
    """Result of the computation that overlapped the exchange."""


class ExpertExchange:
    """`model.cuts.ExpertCut` over the ranks of `ep`.

    With one such rank only statistics are exchanged, between the ranks that share a row.
    """

    def __init__(self, group: dist.ProcessGroup | None, row_group: dist.ProcessGroup | None, tensor_degree: int) -> None:
        self.group = group
        self.row_group = row_group
        self.degree = 1 if group is None else group.size()
        self.rank = 0 if group is None else dist.get_rank(group)
        self.row_ranks = 1 if row_group is None else row_group.size()
        self.loss_share = 1.0 / tensor_degree

    def dispatch(self, rows_MD: Tensor, counts_E: Tensor, meanwhile: Callable[[], Tensor] | None) -> Arrived:
        """Send rows, sorted by expert, to the experts' ranks; `meanwhile` runs before the wait."""
        assert self.group is not None
        sent_Pe = counts_E.view(self.degree, -1).contiguous()
        received_Pe = torch.empty_like(sent_Pe)
        with waiting("expert"):
            dist.all_to_all_single(received_Pe, sent_Pe, group=self.group)
        send, receive = _row_counts(sent_Pe, received_Pe, rows_MD.shape[0])
        exchange = _Journey(self.group, send, receive)
        pending_RD = _Issue.apply(rows_MD, exchange)
        overlapped_output = None if meanwhile is None else meanwhile()
        received_RD = _Await.apply(pending_RD, exchange)
        # Rows arrive rank by rank, those of each rank sorted by expert; sort all of them by
        # expert.
        local_experts_e = torch.arange(received_Pe.shape[1], device=counts_E.device)
        expert_of_R = local_experts_e.repeat(self.degree).repeat_interleave(received_Pe.flatten(), output_size=sum(receive))
        order_R = expert_of_R.argsort(stable=True)
        return Arrived(_Reorder.apply(received_RD, order_R), received_Pe.sum(0), order_R, send, receive, overlapped_output)

    def combine(self, out_RD: Tensor, arrived: Arrived) -> Tensor:
        """Return the experts' outputs to the rows' ranks, in the original order, `[M, D]`."""
        assert self.group is not None
        received_order_RD = _Reorder.apply(out_RD, _inverse(arrived.order_R))
        exchange = _Journey(self.group, arrived.receive, arrived.send)
        returned: Tensor = _Await.apply(_Issue.apply(received_order_RD, exchange), exchange)
        return returned

    def sum_over_row(self, x: Tensor) -> Tensor:
        """Sum `x` in place over the ranks that share a row's tokens, without gradient."""
        if self.row_group is not None:
            with waiting(self.row_group):
                dist.all_reduce(x, group=self.row_group)
        return x

    def gather_row(self, experts_BLK: Tensor, places_L: Tensor | None) -> Tensor:
        """Gather the expert choices of whole rows, `[B, T, K]`, without gradient.

        This rank has the choices of the tokens at positions `places_L`.
        """
        if self.row_group is None or places_L is None:
            return experts_BLK
        size = self.row_group.size()
        parts = experts_BLK.new_empty(size, *experts_BLK.shape)
        places = places_L.new_empty(size, *places_L.shape)
        with waiting(self.row_group):
            all_gather_single(parts.flatten(0, 1), experts_BLK.contiguous(), group=self.row_group)
            all_gather_single(places.flatten(), places_L.contiguous(), group=self.row_group)
        row_BTK = torch.empty_like(parts.transpose(0, 1).flatten(1, 2))
        row_BTK[:, places.flatten()] = parts.transpose(0, 1).flatten(1, 2)
        return row_BTK


def _row_counts(sent_Pe: Tensor, received_Pe: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
    """Read on the host how many rows go to and come from each rank.

    A rehearsal's fake tensors hold no numbers: loads are then even.
    """
    if isinstance(sent_Pe, FakeTensor):
        degree = sent_Pe.shape[0]
        even = [num_rows * (rank + 1) // degree - num_rows * rank // degree for rank in range(degree)]
        return even, [even[0]] * degree
    send, receive = torch.stack([sent_Pe.sum(1), received_Pe.sum(1)]).tolist()
    return send, receive


def _inverse(order_R: Tensor) -> Tensor:
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
        return gradients[0].index_select(0, _inverse(order_R)), None


class _Issue(torch.autograd.Function):
    """Start sending rows. Backward: wait for the gradients whose sending `_Await` started."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        received_RD = x_MD.new_empty(sum(journey.receive), x_MD.shape[1])
        journey.work = issue(received_RD, x_MD.contiguous(), journey.receive, journey.send, journey.group)
        return received_RD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        exchange: _Journey = ctx.journey
        wait(exchange.back)
        gradient_MD = exchange.gradient
        exchange.gradient = None
        exchange.back = None
        assert gradient_MD is not None
        return gradient_MD, None


class _Await(torch.autograd.Function):
    """Wait for the rows. Backward: start sending their gradients; its result is a placeholder."""

    @staticmethod
    def forward(ctx: Any, travelling_RD: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        wait(journey.work)
        journey.work = None
        return travelling_RD.view_as(travelling_RD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        exchange: _Journey = ctx.journey
        gradient_RD = gradients[0].contiguous()
        exchange.gradient = gradient_RD.new_empty(sum(exchange.send), gradient_RD.shape[1])
        exchange.back = issue(exchange.gradient, gradient_RD, exchange.send, exchange.receive, exchange.group)
        return gradient_RD, None


def issue(output: Tensor, rows: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup) -> Any:
    """Start an exchange of rows that `wait` ends.

    It is a separate function so that tests can observe the order.
    """
    return dist.all_to_all_single(output, rows, receive, send, group=group, async_op=True)


def wait(work: Any) -> None:
    """Wait for an exchange that `issue` started."""
    with waiting("expert"):
        work.wait()
