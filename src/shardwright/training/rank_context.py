"""Context of a rank: everything that its part of a run consists of, except the training state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwright.checkpoint.fence import GenerationFence
from shardwright.checkpoint.run_folder import RunFolder
from shardwright.config import Recipe
from shardwright.launch.elastic import Restart
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.launch.stop_signals import StopRequest
from shardwright.layout import RankGrid
from shardwright.plans import Plan
from shardwright.telemetry.event_logger import EventLogger
from shardwright.training.checks.run_checks import ValidatedRun
from shardwright.training.rank_sync import RankSync
from shardwright.watchdog.monitor import WatchdogClient


@dataclass(frozen=True)
class RankContext:
    """Run, device and services of one rank; fixed while it trains."""

    validated_run: ValidatedRun
    rank_environment: RankEnvironment
    device: torch.device
    folder: RunFolder
    event_logger: EventLogger
    rank_sync: RankSync
    stop_request: StopRequest
    watchdog: WatchdogClient
    fence: GenerationFence | None = None
    """Claim of the checkpoint folder, on rank 0; a save after a newer claim fails."""
    is_trial: bool = False
    """True if the run only times its steps: it evaluates and saves nothing."""
    restart: Restart | None = None
    """New start of the ranks to which this generation belongs; None for the first."""

    @property
    def recipe(self) -> Recipe:
        """Recipe of the run, complete and validated."""
        return self.validated_run.recipe

    @property
    def plan(self) -> Plan:
        """Plan that the run executes."""
        return self.validated_run.plan

    @property
    def is_main_rank(self) -> bool:
        """True for the rank that prints and writes the run's files."""
        return self.rank_environment.is_main_rank

    @property
    def data_rank(self) -> int:
        """Index of this rank among the ranks that read different samples."""
        return RankGrid(self.plan.layout).data_rank(self.rank_environment.rank)

    def log_warning(self, message: str, **fields: Any) -> None:
        """Log a warning that is the same on every rank; only rank 0 writes it."""
        if self.is_main_rank:
            self.event_logger.log("warning", message=message, **fields)
