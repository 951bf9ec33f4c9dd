"""Environment variables in which launchers state a rank's place. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerVariables:
    """Names of one launcher's variables."""

    rank: str
    world_size: str
    local_rank: str
    node: str
    """Number of the rank's node in the job."""
    launch: tuple[str, ...]
    """Identity of the launch, the same on all its ranks."""


TORCHRUN = SchedulerVariables(
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "GROUP_RANK",
    ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)
SLURM = SchedulerVariables(
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
SCHEDULERS = (TORCHRUN, SLURM)
"""All launchers, those whose variables override others' first."""
