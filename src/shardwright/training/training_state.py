"""State of a rank that training changes: model, optimizer, scaler and counters."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shardwright.numerics.precision import LossScaler
from shardwright.offload import (
    ActivationOffload,
    OffloadedOptimizer,
    ParameterOffload,
    WeightOffload,
)
from shardwright.parallel import ParallelModel
from shardwright.training.step import TOKEN_OBJECTIVE, Objective


@dataclass
class TrainingState:
    """State that changes during training. `step` counts completed optimizer steps."""

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    scaler: LossScaler | None
    step: int = 0
    num_consecutive_skips: int = 0
    best_loss: float = field(default=float("inf"))
    skipped_data_steps: int = 0
    """Data steps that rollbacks have skipped: step s reads the data of s plus this."""
    objective: Objective = TOKEN_OBJECTIVE
    """Loss that is trained."""
    is_evaluation_due: bool = False
    """True if a stop prevented the evaluation of this step; the resumed run starts with it."""
    activation_offload: ActivationOffload | None = None
    """Saved tensors of blocks in a slower tier; None if none move."""
    weight_offload: WeightOffload | ParameterOffload | None = None
    """Weights of blocks in a slower tier, with adapters the frozen ones; None if none move."""

    def wait_for_update(self) -> None:
        """Make the device wait for an update that overlaps with the next forward pass.

        Required before weights, moments or step counts are read or written outside a pass.
        """
        if isinstance(self.optimizer, OffloadedOptimizer):
            self.optimizer.wait_for_update()

    def close_offloads(self) -> None:
        """End all transfers and free the memory or the files of the slower tiers."""
        if isinstance(self.optimizer, OffloadedOptimizer):
            self.optimizer.close()
        if self.activation_offload is not None:
            self.activation_offload.close()
        if self.weight_offload is not None:
            self.weight_offload.close()
