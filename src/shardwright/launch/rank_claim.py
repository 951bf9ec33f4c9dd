"""Joining of the process group; no two processes of a launch may claim the same rank."""

from __future__ import annotations

import os
import secrets
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwright.errors import InputError, RankFailed
from shardwright.launch.devices import claim_device
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.launch.rank_outcome import extract_first_line
from shardwright.parallel.mesh import init_process_group

_STORE_PREFIX = "shardwright"


def join_ranks(
    rank_environment: RankEnvironment, device: torch.device, timeout_seconds: float
) -> None:
    """Join the process group; does nothing for a world size of 1.

    Raises:
        InputError: The rendezvous port, this rank or its device is taken.
        RankFailed: The other ranks cannot be reached.
    """
    if rank_environment.world_size == 1 or dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_seconds)
    try:
        store = claim_rank(rank_environment, timeout)
        claim_device(store, rank_environment, device)
        init_process_group(
            device.type,
            timeout=timeout,
            store=store,
            rank=rank_environment.rank,
            world_size=rank_environment.world_size,
        )
    except dist.DistError as error:
        address = os.environ.get("MASTER_ADDR")
        port = os.environ.get("MASTER_PORT")
        if "EADDRINUSE" in str(error):
            raise InputError(
                f"port {port} is in use",
                field="MASTER_PORT",
                remedy="Choose a free port, or let --nproc start the ranks",
            ) from error
        reason = extract_first_line(str(error))
        raise RankFailed(
            f"rank {rank_environment.rank} could not connect to the other ranks "
            f"at {address}:{port}: {reason}"
        ) from error


def claim_rank(rank_environment: RankEnvironment, timeout: timedelta) -> dist.Store:
    """Claim this rank in the launch's rendezvous store and return the store.

    Rank 0 draws a random prefix for the keys of this launch, so keys that an older launch left
    in a reused store are ignored. A second process of the same rank, or a rank that reaches the
    store of a launch that still runs (same address and port), finds the claim and fails before
    it joins a collective.

    Raises:
        InputError: Another process has claimed this rank. dist.DistError: The other ranks
            cannot be reached.
    """
    store, rank, _ = next(
        dist.rendezvous(
            "env://", rank_environment.rank, rank_environment.world_size, timeout=timeout
        )
    )
    store.set_timeout(timeout)
    if store.add(f"{_STORE_PREFIX}/rank-{rank}", 1) > 1:
        raise InputError(
            f"rank {rank} is taken: another process has claimed it at this address and port",
            field="RANK",
            got=rank,
            remedy="Give every process its own rank; end processes of an earlier run, "
            "or choose another MASTER_PORT",
        )
    if rank == 0:
        store.set(f"{_STORE_PREFIX}/generation", secrets.token_hex(16))
    token = store.get(f"{_STORE_PREFIX}/generation").decode()
    return dist.PrefixStore(token, store)
