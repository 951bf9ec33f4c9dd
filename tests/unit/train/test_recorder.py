"""Collectives of one process, as its pulse has them; afterwards torch is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwright.parallel.collectives import all_gather_single
from shardwright.train.pulse import Pulse, read_pulse
from shardwright.train.recorder import recording


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_collective_is_noted_once_under_its_number(tmp_path: Path, alone: None) -> None:
    before = dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))
    pulse, x, other = Pulse(tmp_path, 0, 1), torch.ones(4), dist.new_group([0])
    with recording(pulse, tmp_path):
        dist.all_reduce(x)
        all_gather_single(torch.empty(4), x)
        dist.all_reduce(x[:2], group=other, async_op=True).wait()
        dist.broadcast(x, 0)
        dist.barrier()
    dist.all_reduce(x)  # works as before, and is not noted
    assert (dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))) == before
    view = read_pulse(tmp_path / "rank-0.pulse")
    assert view is not None
    told = [f"{entered} {view.channels[entered.channel].ranks}" for entered in view.entered]
    assert told == [
        "all_reduce #1 (4 elements) (0,)",
        "all_gather #2 (4 elements) (0,)",
        "all_reduce #1 (2 elements) (0,)",
        "broadcast #3 (4 elements) (0,)",
        "barrier #4 (0,)",
    ]
    assert len(view.channels) == 2
    assert view.waiting_since is None
    pulse.close()
