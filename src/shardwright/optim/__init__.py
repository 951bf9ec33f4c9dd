"""Optimizers over named parameters, and the learning rate as a function of the step."""

from shardwright.optim.build import build_optimizer, set_learning_rate
from shardwright.optim.schedules import learning_rate_at

__all__ = ["build_optimizer", "learning_rate_at", "set_learning_rate"]
