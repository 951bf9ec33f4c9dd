"""Claims of ranks in the rendezvous store: no two processes of a launch have the same rank."""

from __future__ import annotations

import secrets
from datetime import timedelta

import torch.distributed as dist

from shardwright.errors import InputError
from shardwright.launch.rank_environment import RankEnvironment

_STORE_PREFIX = "shardwright"


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
