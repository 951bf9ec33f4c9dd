"""Bytes of the optimizer states of a rank."""

from __future__ import annotations

from shardwright.planner.candidate import Candidate
from shardwright.planner.engine_model import OPTIMIZER_COSTS
from shardwright.planner.memory.stage_load import StageLoad
from shardwright.planner.model_costs import ModelFacts, ParameterElements


def compute_state_bytes(
    facts: ModelFacts, candidate: Candidate, load: StageLoad, trained: ParameterElements
) -> float:
    """Compute the bytes of the optimizer states of a rank's trained parameters, and of master
    weights in addition to the weights."""
    is_sharded = candidate.layout.zero_stage >= 1
    num_elements = trained.sharded if is_sharded else trained.local
    state_bytes = num_elements * candidate.engine.get_optimizer_bytes(
        candidate.optimizer, candidate.master_bytes
    )
    other_bytes = OPTIMIZER_COSTS[candidate.optimizer].other_bytes * candidate.master_bytes / 4
    if not other_bytes:
        return state_bytes
    return state_bytes + other_bytes * _count_other_elements(facts, candidate, load, trained)


def _count_other_elements(
    facts: ModelFacts, candidate: Candidate, load: StageLoad, trained: ParameterElements
) -> float:
    """Count the trained elements that are in no matrix of a block."""
    blocks = trained  # of adapters, which are all in blocks
    if candidate.adapter is None:
        elements = facts.count_elements(candidate.layout, should_skip_frozen=True)
        blocks = elements.sum_layers(load.layers)
    vectors = blocks.local - blocks.local_matrices
    if candidate.layout.zero_stage == 0:
        return vectors + trained.local - blocks.local
    # Vectors are sharded as evenly as all of a block.
    vectors *= blocks.sharded / blocks.local if blocks.local else 0.0
    return vectors + trained.sharded - blocks.sharded
