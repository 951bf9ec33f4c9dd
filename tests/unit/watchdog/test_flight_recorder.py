"""Collectives of one process, as its pulse has them; afterwards torch is as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwright.parallel.collectives import all_gather_single
from shardwright.watchdog.flight_recorder import enable_nccl_flight_recorder, record_collectives
from shardwright.watchdog.heartbeat import NCCL_PIPE_STEM, HeartbeatWriter, read_heartbeat
from shardwright.watchdog.stack_dump import _wake_pipe_reader


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_collective_is_noted_once_under_its_number(tmp_path: Path, alone: None) -> None:
    before = dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))
    pulse = HeartbeatWriter(tmp_path, 0, 1)
    x = torch.ones(4)
    other = dist.new_group([0])
    with record_collectives(pulse, tmp_path):
        dist.all_reduce(x)
        all_gather_single(torch.empty(4), x)
        dist.all_reduce(x[:2], group=other, async_op=True).wait()
        dist.broadcast(x, 0)
        dist.barrier()
    dist.all_reduce(x)  # works as before, and is not noted
    assert (dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))) == before
    view = read_heartbeat(tmp_path / "rank-0.pulse")
    assert view is not None
    told = [f"{entered} {view.channels[entered.channel_key].ranks}" for entered in view.entries]
    assert told == [
        "all_reduce #1 (4 elements) (0,)",
        "all_gather #2 (4 elements) (0,)",
        "all_reduce #1 (2 elements) (0,)",
        "broadcast #3 (4 elements) (0,)",
        "barrier #4 (0,)",
    ]
    assert len(view.channels) == 2
    assert view.wait_start_seconds is None
    pulse.close()


def test_nccl_is_asked_for_its_own_record_where_the_watchdog_will_call_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its group makes the pipe, by the name that it was given and its rank. What the user has set
    stays.
    """
    names = (
        "TORCH_FR_BUFFER_SIZE",
        "TORCH_FR_DUMP_TEMP_FILE",
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
    )
    for name in names[1:]:
        monkeypatch.setenv(name, "")  # so that what is set here is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv(names[0], "77")
    pulse = HeartbeatWriter(tmp_path, 3, 4)
    enable_nccl_flight_recorder(pulse, tmp_path / "hangs")
    pulse.close()
    assert [os.environ[name] for name in names[:3]] == ["77", f"{tmp_path}/hangs/nccl-rank-", "1"]
    pipe = Path(f"{os.environ[names[3]]}3.pipe")
    assert pipe == tmp_path / f"{NCCL_PIPE_STEM}3.pipe"
    with pytest.raises(OSError, match="No such file"):
        _wake_pipe_reader(pipe)  # no NCCL: nobody is waited for
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    _wake_pipe_reader(pipe)
    assert os.read(reading, 10) == b"1\n"
    os.close(reading)
