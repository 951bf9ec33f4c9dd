"""Whole runs of several ranks on the test device, over its backend `nccl`."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from shardwright.config import Recipe
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.launch.stop_signals import StopRequest
from shardwright.numerics.determinism import CUBLAS_VARIABLE
from shardwright.parallel import mesh
from shardwright.training.rank_run import train_rank
from shardwright.watchdog.monitor import WatchdogClient
from tests.hostcuda import device as test_device
from tests.hostcuda import nccl


def train_as_rank(
    port: int, content: dict[str, Any], *, resume: bool = False, fails_after: int | None = None
) -> None:
    """Train a recipe as this rank of a pool, from joining the ranks to leaving them.

    Args:
        port: Port of a store of this run's own.
        fails_after: Number of steps after which NCCL's thread finds an error in a group.
    """
    nccl.install_once()
    rank = dist.get_rank()
    size = dist.get_world_size()
    pool_store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    before = dict(os.environ)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        CUBLAS_VARIABLE: ":4096:8",  # the device has been used in this process
    }
    begin_step = WatchdogClient.begin_phase

    def begin_and_fail(client: WatchdogClient, phase: str, step: int) -> None:
        if (phase, step) == ("step", fails_after):
            nccl.errors[""] = ErrorType.TIMEOUT
        begin_step(client, phase, step)

    try:
        WatchdogClient.begin_phase = begin_and_fail  # type: ignore[method-assign]
        train_rank(
            Recipe.model_validate(content),
            RankEnvironment(rank, size, rank),
            StopRequest(),
            resume=resume,
        )
    finally:
        WatchdogClient.begin_phase = begin_step  # type: ignore[method-assign]
        nccl.errors[""] = ErrorType.SUCCESS
        os.environ.clear()
        os.environ.update(before)
        mesh.abandon_process_groups()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"after {port}", pool_store),
            rank=rank,
            world_size=size,
        )
    violations = test_device.list_violations()
    assert not violations, violations
