"""Operators of compiled code for products during communication.

A compiler cannot trace communication that overlaps. An operator contains it, and what overlaps
with it is in the same operator or between two. So a compiled block is one graph, with the numbers
and the order of calls of uncompiled code.

An operator that begins communication returns a ticket (`PendingCommunication`), with which another
one waits for it. What is sent stays there too: compiled code reuses the memory of a tensor after
the last operator that takes it.

    operator                waits for        a recomputation keeps its results with
    launch_gathers          -                the gathered tokens
    multiply_arriving       chunk by chunk   the results of these products
    gather_and_multiply     all              the results of these products (`fused`)
    multiply_and_sum        all              the sum
    multiply_gathered_rows  what is pending  - (gradients of weights)
    launch_sums             -                - (gradients of inputs)
    finish_sums             all              - (gradients of inputs)

Legend: as in `communication`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.parallel.pipelined.communication import PendingSums, find_communication
from shardwright.parallel.pipelined.pending_communication import PendingCommunication

_gathers: PendingCommunication[tuple[Tensor, list[Any]]] = PendingCommunication(torch.int64)
"""Tokens that are sent and the gather of each chunk."""

_sums: PendingCommunication[PendingSums] = PendingCommunication(torch.int64)
"""Sums over ranks that have begun."""


@torch.library.custom_op(
    "shardwright::launch_gathers",
    mutates_args=(),
    schema="(Tensor x, str name) -> (Tensor, Tensor)",
)
def launch_gathers(x_BSD: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Begin to gather all tokens, `[C, N / C, D]`; returns them and the ticket."""
    own_BSD = x_BSD.clone()
    gathered, works = find_communication(name).launch_gathers(own_BSD)
    return gathered, _gathers.add((own_BSD, works))


@launch_gathers.register_fake
def _fake_launch_gathers(x_BSD: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return _allocate_gathered(x_BSD, name), _gathers.allocate_ticket()


def _allocate_gathered(x_BSD: Tensor, name: str) -> Tensor:
    communication = find_communication(name)
    batch, length, width = x_BSD.shape
    count = communication.count_chunks(length)
    num_rows = communication.group.size() * batch * (length // count)
    return x_BSD.new_empty(count, num_rows, width)


@torch.library.custom_op(
    "shardwright::multiply_arriving",
    mutates_args=(),
    schema="(Tensor gathered, Tensor ticket, Tensor[] matrices, Tensor?[] biases, "
    "SymInt num_sequences, str name) -> Tensor[]",
)
def multiply_arriving(
    gathered: Tensor,
    ticket: Tensor,
    matrices: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    num_sequences: int,
    name: str,
) -> list[Tensor]:
    """Multiply gathered tokens by each matrix, `[B, L, O]`, chunk by chunk as they arrive."""
    _, works = _gathers.pop(ticket, (gathered, []))
    return find_communication(name).multiply_arriving(
        gathered, works, list(zip(matrices, biases, strict=True)), num_sequences
    )


@multiply_arriving.register_fake
def _fake_multiply_arriving(
    gathered: Tensor,
    ticket: Tensor,
    matrices: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    num_sequences: int,
    name: str,
) -> list[Tensor]:
    length = gathered.shape[0] * gathered.shape[1] // num_sequences
    return [gathered.new_empty(num_sequences, length, each.shape[1]) for each in matrices]


@torch.library.custom_op(
    "shardwright::gather_and_multiply",
    mutates_args=(),
    schema="(Tensor x, Tensor[] matrices, Tensor?[] biases, str name) -> Tensor[]",
)
def gather_and_multiply(
    x_BSD: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor | None], name: str
) -> list[Tensor]:
    """Gather all tokens, and multiply them by each matrix; the tokens come first."""
    gathered, products = find_communication(name).gather_and_multiply(
        x_BSD, list(zip(matrices, biases, strict=True))
    )
    return [gathered, *products]


@gather_and_multiply.register_fake
def _fake_gather_and_multiply(
    x_BSD: Tensor, matrices: Sequence[Tensor], biases: Sequence[Tensor | None], name: str
) -> list[Tensor]:
    batch, length, _ = x_BSD.shape
    length *= find_communication(name).group.size()
    products = [x_BSD.new_empty(batch, length, each.shape[1]) for each in matrices]
    return [_allocate_gathered(x_BSD, name), *products]


@torch.library.custom_op(
    "shardwright::multiply_gathered_rows",
    mutates_args=(),
    schema="(Tensor gathered, Tensor ticket, Tensor other, bool is_left, str name) -> Tensor",
)
def multiply_gathered_rows(
    gathered: Tensor, ticket: Tensor, other_NO: Tensor, is_left: bool, name: str
) -> Tensor:
    """Multiply gathered rows and other rows, summed over rows: `gathered.t() @ other` if
    `is_left`, else `other.t() @ gathered`. Waits for the gather if it is pending."""
    _, works = _gathers.pop(ticket, (gathered, []))
    if works:
        find_communication(name).wait(works)
    rows_ND = gathered.flatten(0, 1)
    left, right = (rows_ND, other_NO) if is_left else (other_NO, rows_ND)
    return left.t() @ right


@multiply_gathered_rows.register_fake
def _fake_multiply_gathered_rows(
    gathered: Tensor, ticket: Tensor, other_NO: Tensor, is_left: bool, name: str
) -> Tensor:
    shape = (gathered.shape[2], other_NO.shape[1])
    return gathered.new_empty(shape if is_left else shape[::-1])


@torch.library.custom_op(
    "shardwright::multiply_and_sum",
    mutates_args=(),
    schema="(Tensor[] inputs, Tensor[] matrices, str name) -> Tensor",
)
def multiply_and_sum(inputs: Sequence[Tensor], matrices: Sequence[Tensor], name: str) -> Tensor:
    """Multiply each input `[B, L, I]` by its matrix, add, and sum over the ranks, `[B, S, O]`."""
    return find_communication(name).multiply_and_sum(inputs, matrices)


@multiply_and_sum.register_fake
def _fake_multiply_and_sum(
    inputs: Sequence[Tensor], matrices: Sequence[Tensor], name: str
) -> Tensor:
    communication = find_communication(name)
    ranks = communication.group.size() if communication.sequence_parallel else 1
    batch, length, _ = inputs[0].shape
    return inputs[0].new_empty(batch, length // ranks, matrices[0].shape[1])


@torch.library.custom_op(
    "shardwright::launch_sums",
    mutates_args=(),
    schema="(Tensor[] gathered, Tensor[] matrices, SymInt num_sequences, str name) -> Tensor",
)
def launch_sums(
    gathered: Sequence[Tensor], matrices: Sequence[Tensor], num_sequences: int, name: str
) -> Tensor:
    """Multiply gathered rows, `[C, N / C, O]`, by each matrix, add, and begin to sum over the
    ranks; returns the ticket."""
    return _sums.add(find_communication(name).launch_sums(gathered, matrices, num_sequences))


@launch_sums.register_fake
def _fake_launch_sums(
    gathered: Sequence[Tensor], matrices: Sequence[Tensor], num_sequences: int, name: str
) -> Tensor:
    return _sums.allocate_ticket()


@torch.library.custom_op(
    "shardwright::finish_sums",
    mutates_args=(),
    schema="(Tensor ticket, Tensor[] earlier, SymInt[] shape, ScalarType dtype, Device device) "
    "-> Tensor",
)
def finish_sums(
    ticket: Tensor,
    earlier: Sequence[Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Wait for sums over the ranks, `[B, S, D]`.

    `earlier` are results that compiled code computes before: they need not wait for the sums.
    """
    return _sums.pop(ticket).finish()


@finish_sums.register_fake
def _fake_finish_sums(
    ticket: Tensor,
    earlier: Sequence[Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)
