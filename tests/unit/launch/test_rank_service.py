"""Release of a failed generation in a process that stays."""

from __future__ import annotations

import io
import json
import queue
import sys
import threading
from pathlib import Path

import pytest

from shardwright.errors import InputError, OutOfMemory, RankFailed
from shardwright.launch import rank_service
from shardwright.launch.rank_service import _is_lost_peer
from tests import forked

RELEASE = """
from datetime import timedelta
import gc, psutil, torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from shardwright.launch.rank_service import release_generation
from shardwright.parallel import mesh
from torch.distributed.device_mesh import DeviceMesh

process = psutil.Process()

def count():
    return len(process.net_connections()), process.num_threads()

def train():
    mesh.init_process_group(
        "cpu", timeout=timedelta(seconds=60), store=dist.HashStore(), rank=0, world_size=1
    )
    device_mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("fsdp",))
    tensor = DTensor.from_local(torch.ones(4), device_mesh, [Shard(0)])
    tensor.sum()

torch.ones(4).sum()
before = count()
for _ in range(2):
    train()
    assert count() > before, count()
    assert release_generation()
    assert not dist.is_initialized()
    assert count() == before, (count(), before)
"""

DISCONNECT = """
import socket, sys
from shardwright.launch.rank_service import disconnect_from_ranks

with socket.create_server(("127.0.0.1", 0)) as server:
    near_end = socket.create_connection(server.getsockname())
    far_end, _ = server.accept()
    with near_end, far_end, open(sys.executable, "rb") as file:
        far_end.settimeout(10.0)
        disconnect_from_ranks()
        assert far_end.recv(1) == b"", "a thread that waits for a peer gets its end"
        assert file.read(1), "other files stay open"
"""


def test_a_released_generation_leaves_no_connections_and_threads() -> None:
    done = forked.run([sys.executable, "-c", RELEASE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("failure", "is_aborted", "expected"),
    [
        (None, False, False),
        (RankFailed("a peer died or hung: Connection closed by peer"), False, True),
        (RankFailed("the run hangs"), False, False),
        (ValueError("unknown"), False, False),
        (ValueError("Default process group has not been initialized"), True, True),
        (InputError("wrong", field="model", got=1), True, False),
        (OutOfMemory("rank 1"), True, False),
        (KeyboardInterrupt(), True, False),
    ],
)
def test_a_process_stays_only_after_the_loss_of_a_peer(
    failure: BaseException | None, is_aborted: bool, expected: bool
) -> None:
    assert _is_lost_peer(failure, is_aborted=is_aborted) == expected


def test_groups_that_cannot_be_aborted_do_not_end_the_reader(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The training thread may change torch's table of groups while it is read."""
    disconnected: list[bool] = []

    def fail() -> None:
        raise RuntimeError("dictionary changed size during iteration")

    def disconnect(*, everywhere: bool) -> None:
        disconnected.append(everywhere)

    monkeypatch.setattr(rank_service, "abort_nccl_groups", fail)
    monkeypatch.setattr(rank_service, "disconnect_from_ranks", disconnect)
    assignment = {"control": "c", "arguments": [], "environment": {}, "log": None}
    lines = "\n".join(map(json.dumps, ({"abort": True}, {"abort": True, "all": True}, assignment)))
    found = rank_service.AssignmentReader(io.BytesIO(lines.encode())).wait()
    assert found is not None
    assert found.control == Path("c")
    assert disconnected == [False, True]
    assert "could not be aborted: dictionary changed size" in caplog.text


def test_an_error_of_the_reader_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would wait for an assignment that nobody reads."""
    reported = queue.SimpleQueue[threading.ExceptHookArgs]()
    monkeypatch.setattr(threading, "excepthook", reported.put)
    assert rank_service.AssignmentReader(io.BytesIO(b"no JSON\n")).wait() is None
    assert reported.get(timeout=10).exc_type is json.JSONDecodeError


def test_connections_to_this_machine_are_shut_down() -> None:
    """In a process of its own, because the test runner has such connections too."""
    done = forked.run(
        [sys.executable, "-c", DISCONNECT], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
