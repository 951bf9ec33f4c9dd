"""Rank of this process, read from the environment of torchrun or Slurm."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.cluster.scheduler_variables import SCHEDULERS, parse_number
from shardwright.errors import InputError


@dataclass(frozen=True)
class RankEnvironment:
    """`rank` of `world_size` ranks, and `local_rank` on its node, the job's node `node`."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node: int = 0

    @property
    def is_main_rank(self) -> bool:
        """True for the rank that prints and writes the run's files."""
        return self.rank == 0


def detect_rank_environment(environment: Mapping[str, str] | None = None) -> RankEnvironment | None:
    """Read this process's rank from the environment; None if no launcher started it.

    torchrun sets RANK, WORLD_SIZE, LOCAL_RANK and GROUP_RANK; srun sets SLURM_PROCID,
    SLURM_NTASKS, SLURM_LOCALID and SLURM_NODEID. A Slurm job of one task (a login shell in an
    allocation) counts as not launched. Without MASTER_ADDR and MASTER_PORT, srun's ranks connect
    to the first node of their step, and both variables are set for the process group.

    >>> detect_rank_environment({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    RankEnvironment(rank=1, world_size=2, local_rank=1, node=0)
    >>> detect_rank_environment({}) is None
    True
    """
    source = os.environ if environment is None else environment
    for scheduler in SCHEDULERS:
        if scheduler.rank in source and scheduler.world_size in source:
            ranks = RankEnvironment(
                parse_number(source, scheduler.rank),
                parse_number(source, scheduler.world_size),
                parse_number(source, scheduler.local_rank) if scheduler.local_rank in source else 0,
                parse_number(source, scheduler.node) if scheduler.node in source else 0,
            )
            if ranks.world_size == 1 and not scheduler.can_launch_one_rank:
                return None
            if not 0 <= ranks.rank < ranks.world_size:
                raise InputError(
                    "the rank is not below the world size",
                    field=scheduler.rank,
                    got=ranks.rank,
                    allowed=f"0 to {ranks.world_size - 1}",
                )
            if environment is None:
                os.environ.update(scheduler.find_rendezvous(os.environ))
            missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in source]
            if environment is None and missing:
                raise InputError(
                    "the ranks do not know where to connect to each other",
                    field=" and ".join(missing),
                    got="not set",
                    remedy="torchrun sets them; "
                    "for other launchers, export the first node's name and a free port",
                )
            return ranks
    return None


def count_local_ranks(environment: Mapping[str, str] | None = None) -> int | None:
    """Count the ranks of this node as torchrun or Slurm states them; None without a launcher.

    >>> count_local_ranks({"SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "8(x2),4"})
    8
    """
    source = os.environ if environment is None else environment
    counts = (scheduler.count_local_ranks(source) for scheduler in SCHEDULERS)
    return next(filter(None, counts), None)


def is_restart() -> bool:
    """Return True if the launcher has restarted its ranks after a failure."""
    return any(int(os.environ.get(scheduler.restarts, "0")) > 0 for scheduler in SCHEDULERS)
