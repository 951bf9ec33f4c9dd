"""Optimizers over named parameters, their state by name, and learning-rate schedules."""

from shardwright.optim.adamw_8bit import check_block_boundaries, require_torchao
from shardwright.optim.factory import build_optimizer, set_learning_rate
from shardwright.optim.learning_rate import compute_learning_rate
from shardwright.optim.sharded_optimizer import MatrixExchange, Moment, ShardedModel
from shardwright.optim.state import (
    collect_optimizer_moments,
    collect_optimizer_tensors,
    collect_optimizer_values,
    load_optimizer_values,
)

__all__ = [
    "MatrixExchange",
    "Moment",
    "ShardedModel",
    "build_optimizer",
    "check_block_boundaries",
    "collect_optimizer_moments",
    "collect_optimizer_tensors",
    "collect_optimizer_values",
    "compute_learning_rate",
    "load_optimizer_values",
    "require_torchao",
    "set_learning_rate",
]
