"""Bytes of functional collectives, which DTensor calls, on a fake process group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.rehearsal.collective_recorder import CollectiveRecorder
from shardwright.rehearsal.fake_contexts import use_fake_group


def run_functional(name: str, x: Tensor) -> None:
    group = dist.group.WORLD
    assert group is not None
    operators = torch.ops._c10d_functional
    if name == "all_gather":
        result = operators.all_gather_into_tensor(x, group.size(), group.group_name)
    elif name == "reduce_scatter":
        result = operators.reduce_scatter_tensor(x, "sum", group.size(), group.group_name)
    else:
        result = operators.all_reduce(x, "sum", group.group_name)
    operators.wait_tensor(result)


@pytest.mark.parametrize(
    ("name", "num_bytes", "sent_bytes"),
    [("all_gather", 128, 96), ("reduce_scatter", 32, 24), ("all_reduce", 32, 48)],
)
def test_functional_collectives_have_the_bytes_of_a_ring(
    name: str, num_bytes: int, sent_bytes: float
) -> None:
    with use_fake_group(0, 4), CollectiveRecorder() as recorder:
        run_functional(name, torch.zeros(8))
    assert [(call.kind, call.num_bytes, call.sent_bytes) for call in recorder.collectives] == [
        (name, num_bytes, sent_bytes)
    ]
