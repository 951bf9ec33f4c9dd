"""Exchanges of uneven numbers of rows between ranks, and their operators for compiled code.

An operator contains what a compiler cannot trace: communication, and the host's read of how many
rows go where. So a block with experts on several ranks is one graph. Sizes that only that read
tells are symbols of the graph, so other numbers of rows compile nothing again.

An exchange is two operators, one that starts it and one that waits for it, with other work
between them. The first returns a ticket (`PendingCommunication`), with which the second one fetches
the rows. The gradient of the second starts the exchange back, and the gradient of the first waits
for it, so the ticket's gradient is another ticket.

Rows are on one of two sides: `tokens`, on the ranks of their tokens, in the order in which they
are sent; or `experts`, on the ranks of their experts, sorted by expert. An operator with
`order_R` has the experts' side as its input (start) or output (finish).

Legend: H parts of the tokens, P ranks, E experts, e experts of one rank, M rows on the tokens'
side, R rows on the experts' side, X rows on either, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.parallel.comm_timing import time_wait
from shardwright.parallel.pipelined.pending_communication import PendingCommunication


def exchange_equal_parts(sent_HPe: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send row p of each part to rank p; return the rows received, `[H, P, e]`."""
    sent_PHe = sent_HPe.transpose(0, 1).contiguous()
    received_PHe = torch.empty_like(sent_PHe)
    with time_wait("expert"):
        dist.all_to_all_single(received_PHe, sent_PHe, group=group)
    return received_PHe.transpose(0, 1)


def read_row_counts(sent_HPe: Tensor, received_HPe: Tensor) -> list[tuple[list[int], list[int]]]:
    """Read on the host how many rows of each part go to and come from each rank.

    Waits for the device, once.
    """
    counts_H2P = torch.stack([sent_HPe.sum(2), received_HPe.sum(2)], 1).tolist()
    return [(send, receive) for send, receive in counts_H2P]


def sort_by_expert(received_Pe: Tensor, num_rows: int) -> Tensor:
    """Return the order of rows that sorts them by expert, `[R]`: indices in order of arrival.

    Rows arrive rank by rank, those of each rank sorted by expert. `num_rows` is the sum of
    `received_Pe`.
    """
    degree, num_experts = received_Pe.shape
    experts_e = torch.arange(num_experts, device=received_Pe.device)
    expert_of_R = experts_e.repeat(degree).repeat_interleave(
        received_Pe.flatten(), output_size=num_rows
    )
    return expert_of_R.argsort(stable=True)


def invert_order(order_R: Tensor) -> Tensor:
    """Return the inverse of a permutation, `[R]`."""
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(order_R.shape[0], device=order_R.device)
    return inverse_R


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


_groups_by_name: dict[str, dist.ProcessGroup] = {}
"""Process groups of this process; an operator takes no group, only its name."""


def register_group(group: dist.ProcessGroup) -> str:
    """Return the name by which operators find the group."""
    name: str = group.group_name
    _groups_by_name[name] = group
    return name


def get_group(name: str) -> dist.ProcessGroup:
    """Return a registered group."""
    return _groups_by_name[name]


@dataclass(frozen=True)
class TracedCounts:
    """Numbers of rows of an exchange in compiled code.

    Attributes:
        received_Pe: rows of each of this rank's experts, by the rank that sends them.
        host_counts_2P: rows sent to and received from each rank, in host memory.
        group_name: name of the registered group.
    """

    received_Pe: Tensor
    host_counts_2P: Tensor
    group_name: str

    def sort_received(self) -> Tensor:
        """Return the order of the received rows that sorts them by expert, `[R]`."""
        order_R: Tensor = _sort_received(self.received_Pe, self.host_counts_2P)
        return order_R

    def start(self, rows_XD: Tensor, order_R: Tensor | None = None) -> Tensor:
        """Start to send rows to the other side; returns the ticket for `finish`."""
        ticket: Tensor = _start_exchange(rows_XD, order_R, self.host_counts_2P, self.group_name)
        return ticket

    def finish(
        self, ticket: Tensor, order_R: Tensor | None, num_rows: int, like_XD: Tensor
    ) -> Tensor:
        """Wait for the `num_rows` rows of an exchange, `[num_rows, D]`.

        `like_XD` has the width, dtype and device of the rows.
        """
        rows_XD: Tensor = _finish_exchange(
            ticket,
            order_R,
            self.host_counts_2P,
            self.group_name,
            num_rows,
            like_XD.shape[1],
            like_XD.dtype,
            like_XD.device,
        )
        return rows_XD


def exchange_traced_counts(counts_HE: Tensor, group_name: str) -> list[TracedCounts]:
    """Exchange each part's numbers of rows in compiled code; the host waits for them."""
    received_HPe, host_counts_H2P = _exchange_counts(counts_HE, group_name)
    return [
        TracedCounts(received_HPe[part], host_counts_H2P[part], group_name)
        for part in range(counts_HE.shape[0])
    ]


@torch.library.custom_op(
    "shardwright::exchange_counts",
    mutates_args=(),
    schema="(Tensor counts, str group) -> (Tensor, Tensor)",
)
def _exchange_counts(counts_HE: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    group = _groups_by_name[group_name]
    sent_HPe = counts_HE.unflatten(1, (group.size(), -1))
    received_HPe = exchange_equal_parts(sent_HPe, group).contiguous()
    return received_HPe, torch.tensor(read_row_counts(sent_HPe, received_HPe))


@_exchange_counts.register_fake
def _fake_exchange_counts(counts_HE: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    degree = _groups_by_name[group_name].size()
    num_parts = counts_HE.shape[0]
    return (
        counts_HE.new_empty(num_parts, degree, counts_HE.shape[1] // degree),
        torch.empty(num_parts, 2, degree, dtype=torch.int64, device="cpu"),
    )


@torch.library.custom_op(
    "shardwright::sort_received",
    mutates_args=(),
    schema="(Tensor received, Tensor host_counts) -> Tensor",
)
def _sort_received(received_Pe: Tensor, host_counts_2P: Tensor) -> Tensor:
    return sort_by_expert(received_Pe, sum(host_counts_2P[1].tolist()))


@_sort_received.register_fake
def _fake_sort_received(received_Pe: Tensor, host_counts_2P: Tensor) -> Tensor:
    return received_Pe.new_empty(torch.library.get_ctx().new_dynamic_size())


_exchanges: PendingCommunication[tuple[Tensor, Tensor, Any]] = PendingCommunication(torch.float64)
"""Rows that are sent, buffer of those received, and work. Tickets are floats, so that they may
require gradients."""


@torch.library.custom_op(
    "shardwright::start_exchange",
    mutates_args=(),
    schema="(Tensor rows, Tensor? order, Tensor host_counts, str group) -> Tensor",
)
def _start_exchange(
    rows_XD: Tensor, order_R: Tensor | None, host_counts_2P: Tensor, group_name: str
) -> Tensor:
    send, receive = host_counts_2P.tolist()
    if order_R is None:
        # Inductor reuses the memory of the input after this operator, while it is still sent.
        rows_XD = rows_XD.clone(memory_format=torch.contiguous_format)
    else:
        rows_XD = rows_XD.index_select(0, invert_order(order_R))
        send, receive = receive, send
    buffer_XD = rows_XD.new_empty(sum(receive), rows_XD.shape[1])
    work = start_all_to_all(buffer_XD, rows_XD, receive, send, _groups_by_name[group_name])
    return _exchanges.add((rows_XD, buffer_XD, work))


@_start_exchange.register_fake
def _fake_start_exchange(
    rows_XD: Tensor, order_R: Tensor | None, host_counts_2P: Tensor, group_name: str
) -> Tensor:
    return _exchanges.allocate_ticket()


@torch.library.custom_op(
    "shardwright::finish_exchange",
    mutates_args=(),
    schema="(Tensor ticket, Tensor? order, Tensor host_counts, str group, SymInt num_rows, "
    "SymInt width, ScalarType dtype, Device device) -> Tensor",
)
def _finish_exchange(
    ticket: Tensor,
    order_R: Tensor | None,
    host_counts_2P: Tensor,
    group_name: str,
    num_rows: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    _, buffer_XD, work = _exchanges.pop(ticket)
    wait_all_to_all(work)
    return buffer_XD if order_R is None else buffer_XD.index_select(0, order_R)


@_finish_exchange.register_fake
def _fake_finish_exchange(
    ticket: Tensor,
    order_R: Tensor | None,
    host_counts_2P: Tensor,
    group_name: str,
    num_rows: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return torch.empty(num_rows, width, dtype=dtype, device=device)


def _save_start(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows_XD, order_R, host_counts_2P, ctx.group_name = inputs
    ctx.save_for_backward(order_R, host_counts_2P)
    ctx.num_rows, ctx.width = rows_XD.shape
    ctx.dtype = rows_XD.dtype
    ctx.device = rows_XD.device


def _differentiate_start(ctx: Any, d_ticket: Tensor) -> tuple[Any, ...]:
    order_R, host_counts_2P = ctx.saved_tensors
    d_rows_XD = _finish_exchange(
        d_ticket,
        order_R,
        host_counts_2P,
        ctx.group_name,
        ctx.num_rows,
        ctx.width,
        ctx.dtype,
        ctx.device,
    )
    return d_rows_XD, None, None, None


def _save_finish(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order_R, host_counts_2P, ctx.group_name, *_ = inputs
    ctx.save_for_backward(order_R, host_counts_2P)


def _differentiate_finish(ctx: Any, d_rows_XD: Tensor) -> tuple[Any, ...]:
    order_R, host_counts_2P = ctx.saved_tensors
    d_ticket = _start_exchange(d_rows_XD, order_R, host_counts_2P, ctx.group_name)
    return d_ticket, *[None] * 7


_start_exchange.register_autograd(_differentiate_start, setup_context=_save_start)
_finish_exchange.register_autograd(_differentiate_finish, setup_context=_save_finish)
