"""Expert parallelism: rows go to the ranks that hold their experts, and what becomes of them comes back.

Nothing is dropped and nothing padded: ranks tell each other how many rows go where (this waits on the host, once per layer), then
exchange exactly those. The ranks of `ep` are neighbours on dp_shard x cp; each holds experts / ep of them, whole or, with tensor
parallelism, their share of every expert's features.

An exchange is two nodes of the autograd graph, one where it is issued and one where it is waited for, so that other work stands
between them in both directions: shared experts while rows travel to the experts, the gradient of shared experts while the rows'
gradients travel home. Every rank enters every exchange, forward and backward, with no row to send as well: a rank that stayed out
would leave the others waiting. Gradients arrive summed over the ranks that sent the rows; nobody sums experts' gradients over `ep`.

Legend: E experts, e experts of one rank, P ranks of ep, M rows sent, R rows received, D hidden, B rows of tokens, L tokens of this
context rank, T tokens of a row, K experts per token.
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
    """What a sparse model's layers ask of other ranks; None where no rank has anything that this one lacks."""
    if mesh is None or shape.experts is None or layout.ep == layout.cp == layout.tp == 1:
        return None
    return ExpertExchange(mesh.group("ep"), mesh.group("cp"), layout.tp)


@dataclass
class _Journey:
    """Rows on their way: how many go to and come from each rank, and the messages in flight."""

    group: dist.ProcessGroup
    send: list[int]
    receive: list[int]
    work: Any = None
    back: Any = None
    gradient: Tensor | None = None


@dataclass(frozen=True)
class Arrived:
    """Rows at the ranks of their experts."""

    rows_RD: Tensor
    """Sorted by expert."""
    counts_e: Tensor
    """Rows of each expert that this rank holds."""
    order_R: Tensor = field(repr=False)
    """Which of the rows as they came lies where."""
    send: list[int]
    receive: list[int]
    meanwhile: Tensor | None
    """What was computed while rows travelled."""


class ExpertExchange:
    """Keeps `model.cuts.ExpertCut` over the ranks of `ep`; with one of those, only what a row's other ranks must tell."""

    def __init__(self, group: dist.ProcessGroup | None, row_group: dist.ProcessGroup | None, tensor_degree: int) -> None:
        self.group, self.row_group = group, row_group
        self.degree = 1 if group is None else group.size()
        self.rank = 0 if group is None else dist.get_rank(group)
        self.row_ranks = 1 if row_group is None else row_group.size()
        self.loss_share = 1.0 / tensor_degree

    def dispatch(self, rows_MD: Tensor, counts_E: Tensor, meanwhile: Callable[[], Tensor] | None) -> Arrived:
        """Rows sorted by expert to the ranks of the experts; `meanwhile` is computed before they are waited for."""
        assert self.group is not None
        sent_Pe = counts_E.view(self.degree, -1).contiguous()
        received_Pe = torch.empty_like(sent_Pe)
        with waiting("expert"):
            dist.all_to_all_single(received_Pe, sent_Pe, group=self.group)
        send, receive = _row_counts(sent_Pe, received_Pe, rows_MD.shape[0])
        journey = _Journey(self.group, send, receive)
        travelling_RD = _Issue.apply(rows_MD, journey)
        done = None if meanwhile is None else meanwhile()
        came_RD = _Await.apply(travelling_RD, journey)
        # They came rank by rank, each rank's sorted by expert; experts want theirs together.
        numbers_e = torch.arange(received_Pe.shape[1], device=counts_E.device)
        expert_of_R = numbers_e.repeat(self.degree).repeat_interleave(received_Pe.flatten(), output_size=sum(receive))
        order_R = expert_of_R.argsort(stable=True)
        return Arrived(_Reorder.apply(came_RD, order_R), received_Pe.sum(0), order_R, send, receive, done)

    def combine(self, out_RD: Tensor, arrived: Arrived) -> Tensor:
        """What the experts made of the rows, back where these came from and in their order, `[M, D]`."""
        assert self.group is not None
        as_they_came_RD = _Reorder.apply(out_RD, _inverse(arrived.order_R))
        journey = _Journey(self.group, arrived.receive, arrived.send)
        returned: Tensor = _Await.apply(_Issue.apply(as_they_came_RD, journey), journey)
        return returned

    def sum_over_row(self, x: Tensor) -> Tensor:
        """`x` summed in place over the ranks that have other tokens of the same rows; no gradient passes."""
        if self.row_group is not None:
            with waiting(self.row_group):
                dist.all_reduce(x, group=self.row_group)
        return x

    def gather_row(self, experts_BLK: Tensor, places_L: Tensor | None) -> Tensor:
        """The choices of whole rows, `[B, T, K]`, of which this rank has those at `places_L`; no gradient passes."""
        if self.row_group is None or places_L is None:
            return experts_BLK
        size = self.row_group.size()
        parts = experts_BLK.new_empty(size, *experts_BLK.shape)
        places = places_L.new_empty(size, *places_L.shape)
        with waiting(self.row_group):
            all_gather_single(parts.flatten(0, 1), experts_BLK.contiguous(), group=self.row_group)
            all_gather_single(places.flatten(), places_L.contiguous(), group=self.row_group)
        whole_BTK = torch.empty_like(parts.transpose(0, 1).flatten(1, 2))
        whole_BTK[:, places.flatten()] = parts.transpose(0, 1).flatten(1, 2)
        return whole_BTK


def _row_counts(sent_Pe: Tensor, received_Pe: Tensor, num_rows: int) -> tuple[list[int], list[int]]:
    """Rows to and from each rank, read on the host. A rehearsal's fake tensors hold no numbers: there, loads are even."""
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
    """Rows in another order. Indexing's own backward would add rows up one by one."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, order_R: Tensor) -> Tensor:
        ctx.save_for_backward(order_R)
        return x_RD.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (order_R,) = ctx.saved_tensors
        return gradients[0].index_select(0, _inverse(order_R)), None


class _Issue(torch.autograd.Function):
    """Sends rows off without waiting. Backward: waits for the gradients that `_Await` sent off."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        received_RD = x_MD.new_empty(sum(journey.receive), x_MD.shape[1])
        journey.work = issue(received_RD, x_MD.contiguous(), journey.receive, journey.send, journey.group)
        return received_RD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        journey: _Journey = ctx.journey
        wait(journey.back)
        home_MD, journey.gradient, journey.back = journey.gradient, None, None
        assert home_MD is not None
        return home_MD, None


class _Await(torch.autograd.Function):
    """Waits for the rows. Backward: sends their gradients off; what it hands on is a place-holder that nobody reads."""

    @staticmethod
    def forward(ctx: Any, travelling_RD: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        wait(journey.work)
        journey.work = None
        return travelling_RD.view_as(travelling_RD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        journey: _Journey = ctx.journey
        gradient_RD = gradients[0].contiguous()
        journey.gradient = gradient_RD.new_empty(sum(journey.send), gradient_RD.shape[1])
        journey.back = issue(journey.gradient, gradient_RD, journey.send, journey.receive, journey.group)
        return gradient_RD, None


def issue(output: Tensor, rows: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup) -> Any:
    """Begin an exchange of rows; `wait` ends it. Apart from the graph's nodes so that tests can see the order."""
    return dist.all_to_all_single(output, rows, receive, send, group=group, async_op=True)


def wait(work: Any) -> None:
    """End an exchange."""
    with waiting("expert"):
        work.wait()
