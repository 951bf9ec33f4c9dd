"""Each rank of a generation is one process: a store in which it is claimed already belongs to others."""

from __future__ import annotations

import secrets
from datetime import timedelta

import torch.distributed as dist

from shardwright.errors import InputError
from shardwright.train.ranks import RankEnvironment

_PREFIX = "shardwright"


def claimed_store(ranks: RankEnvironment, timeout: timedelta) -> dist.Store:
    """The store where the ranks of this generation meet, with this rank claimed in it, under a token that rank 0 has drawn.

    A second process of the same rank, or a rank that reaches the store of a generation which still lives (the same address and
    port), finds the claim and is refused, before it could take part in any collective. What an older generation left in a store
    that is used again stands under another token.

    Raises:
        InputError: this rank is claimed already.
        dist.DistError: the others cannot be reached.
    """
    store, rank, _ = next(dist.rendezvous("env://", ranks.rank, ranks.world_size, timeout=timeout))
    store.set_timeout(timeout)
    if store.add(f"{_PREFIX}/rank-{rank}", 1) > 1:
        raise InputError(
            f"rank {rank} is taken: another process, or a generation that still lives, has claimed it at this address and port",
            field="RANK",
            got=rank,
            remedy="Give every process a rank of its own; end what is left of the run before, or choose another MASTER_PORT",
        )
    if rank == 0:
        store.set(f"{_PREFIX}/generation", secrets.token_hex(16))
    token = store.get(f"{_PREFIX}/generation").decode()
    return dist.PrefixStore(token, store)
