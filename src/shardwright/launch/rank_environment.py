"""Rank of this process, read from the environment of torchrun or Slurm."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.errors import InputError


@dataclass(frozen=True)
class RankEnvironment:
    """`rank` of `world_size` ranks, and `local_rank` on its node."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @property
    def is_main_rank(self) -> bool:
        """True for the rank that prints and writes the run's files."""
        return self.rank == 0


def detect_rank_environment(environment: Mapping[str, str] | None = None) -> RankEnvironment | None:
    """Read this process's rank from the environment; None if no launcher started it.

    torchrun sets RANK, WORLD_SIZE and LOCAL_RANK; srun sets SLURM_PROCID, SLURM_NTASKS and
    SLURM_LOCALID. A Slurm job of one task (a login shell in an allocation) counts as not
    launched. Under srun, MASTER_ADDR and MASTER_PORT must be set.

    >>> detect_rank_environment({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    RankEnvironment(rank=1, world_size=2, local_rank=1)
    >>> detect_rank_environment({}) is None
    True
    """
    source = os.environ if environment is None else environment
    for rank, world_size, local_rank in (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ):
        if rank in source and world_size in source:
            ranks = RankEnvironment(
                _parse_int(source, rank),
                _parse_int(source, world_size),
                _parse_int(source, local_rank) if local_rank in source else 0,
            )
            if rank == "SLURM_PROCID" and ranks.world_size == 1:
                return None
            if not 0 <= ranks.rank < ranks.world_size:
                raise InputError(
                    "the rank is not below the world size",
                    field=rank,
                    got=ranks.rank,
                    allowed=f"0 to {ranks.world_size - 1}",
                )
            missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in source]
            if environment is None and missing:
                raise InputError(
                    "the ranks cannot connect to each other",
                    field=" and ".join(missing),
                    got="not set",
                    remedy="torchrun sets them; "
                    "under srun, export the first node's name and a free port",
                )
            return ranks
    return None


def count_local_ranks(environment: Mapping[str, str] | None = None) -> int | None:
    """Count the ranks of this node as torchrun or Slurm states them; None without a launcher.

    >>> count_local_ranks({"SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "8(x2),4"})
    8
    """
    source = os.environ if environment is None else environment
    if "LOCAL_WORLD_SIZE" in source:
        return _parse_int(source, "LOCAL_WORLD_SIZE") or None
    if "SLURM_PROCID" not in source:
        return None
    # Nodes with the same number are written together: `8(x2),4` are nodes with 8, 8 and 4.
    counts = re.findall(r"(?:^|,)(\d+)", source.get("SLURM_TASKS_PER_NODE", ""))
    return max(map(int, counts), default=None)


def is_torchrun_restart() -> bool:
    """Return True if torchrun has restarted its ranks after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _parse_int(source: Mapping[str, str], name: str) -> int:
    try:
        return int(source[name])
    except ValueError:
        raise InputError("not a whole number", field=name, got=repr(source[name])) from None
