"""Collectives of one process in its heartbeat file; torch is restored afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwright.parallel.collectives import all_gather_single
from shardwright.watchdog import flight_recorder
from shardwright.watchdog.flight_recorder import enable_nccl_flight_recorder, record_collectives
from shardwright.watchdog.heartbeat import NCCL_PIPE_STEM, HeartbeatWriter, read_heartbeat
from shardwright.watchdog.nccl_records import get_record_stem
from shardwright.watchdog.stack_dump import _wake_pipe_reader


@pytest.fixture
def single_rank_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_collective_is_recorded_once_with_its_number(
    tmp_path: Path, single_rank_group: None
) -> None:
    before = dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))
    heartbeat = HeartbeatWriter(tmp_path, 0, 1)
    x = torch.ones(4)
    other = dist.new_group([0])
    with record_collectives(heartbeat, tmp_path):
        dist.all_reduce(x)
        all_gather_single(torch.empty(4), x)
        dist.all_reduce(x[:2], group=other, async_op=True).wait()
        dist.broadcast(x, 0)
        dist.barrier()
    dist.all_reduce(x)  # works as before, and is not recorded
    assert (dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))) == before
    view = read_heartbeat(tmp_path / "rank-0.pulse")
    assert view is not None
    entries = [f"{entry} {view.channels[entry.channel_key].ranks}" for entry in view.entries]
    assert entries == [
        "all_reduce #1 (4 elements) (0,)",
        "all_gather #2 (4 elements) (0,)",
        "all_reduce #1 (2 elements) (0,)",
        "broadcast #3 (4 elements) (0,)",
        "barrier #4 (0,)",
    ]
    assert len(view.channels) == 2
    assert view.wait_start_seconds is None
    heartbeat.close()


VARIABLES = (
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_NCCL_ENABLE_TIMING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
)


@pytest.fixture
def nccl_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(flight_recorder, "_was_enabled", False)
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    return monkeypatch


def test_the_flight_recorder_of_nccl_is_enabled_with_the_pipe_of_the_watchdog(
    tmp_path: Path, nccl_environment: pytest.MonkeyPatch
) -> None:
    """NCCL creates the pipe from the given name and its rank. Variables that are set stay."""
    nccl_environment.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "77")
    heartbeat = HeartbeatWriter(tmp_path, 3, 4)
    enable_nccl_flight_recorder(heartbeat, tmp_path / "hangs")
    heartbeat.close()
    values = [os.environ[name] for name in VARIABLES]
    assert values[:6] == ["77", "77", *[f"{tmp_path}/hangs/nccl-rank-"] * 2, "1", "1"]
    assert get_record_stem(tmp_path / "hangs", {}) == values[2]
    pipe = Path(f"{values[6]}3.pipe")
    assert pipe == tmp_path / f"{NCCL_PIPE_STEM}3.pipe"
    with pytest.raises(OSError, match="No such file"):
        _wake_pipe_reader(pipe)  # without NCCL there is no pipe
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    _wake_pipe_reader(pipe)
    assert os.read(reader, 10) == b"1\n"
    os.close(reader)


def test_a_process_that_outlives_a_generation_says_that_it_has_no_record(
    tmp_path: Path, nccl_environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heartbeat = HeartbeatWriter(tmp_path, 0, 2)
    for expected in (0, 1):
        enable_nccl_flight_recorder(heartbeat, tmp_path)
        assert caplog.text.count("without NCCL's record") == expected
    heartbeat.close()


@pytest.mark.parametrize(("timeout_seconds", "expected"), [(60.0, "480"), (1799.5, "1800")])
def test_torch_does_not_abort_before_the_watchdog(
    timeout_seconds: float,
    expected: str,
    tmp_path: Path,
    nccl_environment: pytest.MonkeyPatch,
) -> None:
    heartbeat = HeartbeatWriter(tmp_path, 0, 2)
    enable_nccl_flight_recorder(heartbeat, tmp_path, timeout_seconds)
    heartbeat.close()
    assert os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == expected
