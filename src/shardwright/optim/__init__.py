"""Optimizers over named parameters, their state by name, and the learning rate as a function of the step."""

from shardwright.optim.build import build_optimizer, set_learning_rate
from shardwright.optim.schedules import learning_rate_at
from shardwright.optim.state import load_optimizer_values, optimizer_tensors, optimizer_values

__all__ = [
    "build_optimizer",
    "learning_rate_at",
    "load_optimizer_values",
    "optimizer_tensors",
    "optimizer_values",
    "set_learning_rate",
]
