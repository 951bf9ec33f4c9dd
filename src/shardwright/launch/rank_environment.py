"""Rank of this process, read from the environment of torchrun or Slurm."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.cluster.scheduler_variables import SCHEDULERS, SLURM
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
                _parse_int(source, scheduler.rank),
                _parse_int(source, scheduler.world_size),
                _parse_int(source, scheduler.local_rank) if scheduler.local_rank in source else 0,
                _parse_int(source, scheduler.node) if scheduler.node in source else 0,
            )
            if scheduler is SLURM and ranks.world_size == 1:
                return None
            if not 0 <= ranks.rank < ranks.world_size:
                raise InputError(
                    "the rank is not below the world size",
                    field=scheduler.rank,
                    got=ranks.rank,
                    allowed=f"0 to {ranks.world_size - 1}",
                )
            if environment is None and scheduler is SLURM:
                os.environ.update(find_slurm_rendezvous(os.environ))
            missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in source]
            if environment is None and missing:
                raise InputError(
                    "the ranks cannot connect to each other",
                    field=" and ".join(missing),
                    got="not set",
                    remedy="torchrun sets them; "
                    "for other launchers, export the first node's name and a free port",
                )
            return ranks
    return None


def find_slurm_rendezvous(environment: Mapping[str, str]) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT of a Slurm step, each only if it is not set.

    The address is the step's first node, where rank 0 runs. The port follows from the numbers of
    job and step, so that steps on one node differ.

    >>> find_slurm_rendezvous({"SLURM_STEP_NODELIST": "gpu[07-09,12]-ib,cpu1",
    ...                        "SLURM_JOB_ID": "20003", "SLURM_STEP_ID": "1"})
    {'MASTER_ADDR': 'gpu07-ib', 'MASTER_PORT': '20010'}
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST") or ""
    # `gpu[07-09,12]-ib,cpu1` are gpu07-ib, gpu08-ib, gpu09-ib, gpu12-ib and cpu1.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    job = environment.get("SLURM_JOB_ID", "")
    step = environment.get("SLURM_STEP_ID", "0")
    found = {}
    if first is not None:
        found["MASTER_ADDR"] = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])
    if job.isdecimal() and step.isdecimal():
        found["MASTER_PORT"] = str(20000 + (int(job) + 7 * int(step)) % 20000)
    return {name: value for name, value in found.items() if name not in environment}


def count_local_ranks(environment: Mapping[str, str] | None = None) -> int | None:
    """Count the ranks of this node as torchrun or Slurm states them; None without a launcher.

    >>> count_local_ranks({"SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "8(x2),4"})
    8
    """
    source = os.environ if environment is None else environment
    if "LOCAL_WORLD_SIZE" in source:
        return _parse_int(source, "LOCAL_WORLD_SIZE") or None
    if SLURM.rank not in source:
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
