"""Optimizers over named parameters, their state by name, and learning-rate schedules."""

from shardwright.optim.adamw_8bit import check_blocks, require_torchao
from shardwright.optim.build import build_optimizer, set_learning_rate
from shardwright.optim.cut import MatrixExchange, ModelCut, Moment
from shardwright.optim.schedules import learning_rate_at
from shardwright.optim.state import load_optimizer_values, optimizer_moments, optimizer_tensors, optimizer_values

__all__ = [
    "MatrixExchange",
    "ModelCut",
    "Moment",
    "build_optimizer",
    "check_blocks",
    "learning_rate_at",
    "load_optimizer_values",
    "optimizer_moments",
    "optimizer_tensors",
    "optimizer_values",
    "require_torchao",
    "set_learning_rate",
]
