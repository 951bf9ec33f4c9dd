"""Operators of compiled code that begin communication and end it later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwright.parallel.experts import row_exchange
from shardwright.parallel.pipelined import communication, operators
from shardwright.parallel.pipelined.communication import PipelinedCommunication


class Group(NamedTuple):
    """Process group of one rank."""

    group_name: str = "own"

    def size(self) -> int:
        return 1


class Transfer(NamedTuple):
    """Communication that reads what is sent as late as it may."""

    received: Tensor
    sent: Tensor

    def wait(self) -> None:
        self.received.copy_(self.sent)


def send_rows(rows_ND: Tensor) -> Callable[[], Tensor]:
    counts_2P = torch.tensor([[4], [4]])
    ticket = row_exchange._start_exchange(rows_ND, None, counts_2P, "own")
    return lambda: row_exchange._finish_exchange(
        ticket, None, counts_2P, "own", 4, 2, rows_ND.dtype, rows_ND.device
    )


def send_tokens(rows_ND: Tensor) -> Callable[[], Tensor]:
    name = PipelinedCommunication(Group(), "chunked", True).name  # type: ignore[arg-type]
    gathered, ticket = operators.launch_gathers(rows_ND[None], name)
    return lambda: operators.multiply_arriving(gathered, ticket, [torch.eye(2)], [None], 1, name)[0]


@pytest.mark.parametrize("begin", [send_rows, send_tokens])
def test_compiled_code_may_reuse_the_memory_of_sent_tensors(
    begin: Callable[[Tensor], Callable[[], Tensor]],
) -> None:
    def start(output: Tensor, rows: Tensor, *_: Any, **__: Any) -> Transfer:
        return Transfer(output, rows)

    rows_ND = torch.arange(8.0).view(4, 2)
    expected = rows_ND.clone()
    with (
        patch.object(row_exchange, "start_all_to_all", start),
        patch.object(row_exchange, "_groups_by_name", {"own": Group()}),
        patch.object(communication, "all_gather_single", start),
    ):
        finish = begin(rows_ND)
        rows_ND.zero_()
        torch.testing.assert_close(finish().view(4, 2), expected)
