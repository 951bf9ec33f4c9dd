"""Result of one optimizer step, from which its event is made."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.offload import TransferCounts
from shardwright.training.metrics.expert_load import ExpertLoads
from shardwright.training.metrics.rank_metrics import MeasuredStep
from shardwright.training.metrics.rounding import RoundingReport
from shardwright.training.preference_objective import PreferenceMetrics
from shardwright.training.step import StepUpdate


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step. Identical on all ranks except for the marks."""

    step: int
    """Number of the step, from 1."""
    loss: float
    update: StepUpdate
    learning_rate: float
    supervised_tokens: int
    tokens: int
    """Tokens that all ranks computed: supervised, unsupervised and padding."""
    flops_per_token: float
    """Mean FLOPs per token of the model; attention costs more in longer rows."""
    samples_seen: int
    """Sequences that all steps so far have read or skipped."""
    loss_scale: float | None
    """Loss scale after the step; None unless the precision is fp16."""
    measured: MeasuredStep
    """Marks of this rank, whose device may still run the update."""
    expert_loads: ExpertLoads | None
    """Expert loads. None for dense models."""
    preference_metrics: PreferenceMetrics | None = None
    """Mean rewards of the step's pairs. None without preference tuning."""
    transfers: TransferCounts | None = None
    """Transfers of offloaded states. None without offloading."""
    rounding: RoundingReport | None = None
    """Rounding of quantised operands. None in other precisions, and in steps that do not count."""
    activation_transfers: TransferCounts | None = None
    """Transfers of saved tensors. None if none are offloaded."""
    parameter_transfers: TransferCounts | None = None
    """Transfers of weights. None if none are offloaded."""
