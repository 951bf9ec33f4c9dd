"""Environment variables in which launchers state a rank's place. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardwright.errors import InputError


def parse_number(environment: Mapping[str, str], name: str) -> int:
    """Return the whole number in a variable.

    Raises:
        InputError: the variable has another value.
    """
    try:
        return int(environment[name])
    except ValueError:
        raise InputError("not a whole number", field=name, got=repr(environment[name])) from None


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


def _count_slurm_tasks(environment: Mapping[str, str]) -> int | None:
    if "SLURM_PROCID" not in environment:
        return None
    # Nodes with the same number are written together: `8(x2),4` are nodes with 8, 8 and 4.
    counts = re.findall(r"(?:^|,)(\d+)", environment.get("SLURM_TASKS_PER_NODE", ""))
    return max(map(int, counts), default=None)


def _count_torchrun_ranks(environment: Mapping[str, str]) -> int | None:
    name = "LOCAL_WORLD_SIZE"
    return parse_number(environment, name) if name in environment else None


@dataclass(frozen=True)
class SchedulerVariables:
    """Names of one launcher's variables, and functions that read those with its own format."""

    rank: str
    world_size: str
    local_rank: str
    node: str
    """Number of the rank's node in the job."""
    restarts: str
    """Number of restarts of the launch. Ranks of a restart resume a run that has begun."""
    launch: tuple[str, ...]
    """Identity of the launch, the same on all its ranks."""
    count_local_ranks: Callable[[Mapping[str, str]], int | None]
    """Count the ranks of this node, or of the largest node; None if unknown."""
    find_rendezvous: Callable[[Mapping[str, str]], dict[str, str]] = lambda _environment: {}
    """Return MASTER_ADDR and MASTER_PORT if the launcher sets neither but states its nodes."""
    can_launch_one_rank: bool = True
    """False if a login shell has the variables too, as a job of one task."""


TORCHRUN = SchedulerVariables(
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "GROUP_RANK",
    "TORCHELASTIC_RESTART_COUNT",
    ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    count_local_ranks=_count_torchrun_ranks,
)
SLURM = SchedulerVariables(
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_RESTART_COUNT",
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    count_local_ranks=_count_slurm_tasks,
    find_rendezvous=find_slurm_rendezvous,
    can_launch_one_rank=False,
)
SCHEDULERS = (TORCHRUN, SLURM)
"""All launchers, those whose variables override others' first."""
