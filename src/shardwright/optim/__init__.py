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
