"""Bytes of quantised weights that ZeRO gathers: as they are stored, and adapters in the compute
precision."""

from __future__ import annotations

from dataclasses import replace

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.element_counts import count_adapter_elements, count_rank_elements
from shardwright.planner.memory.stage_load import StageLoad
from shardwright.planner.model_costs import ModelFacts


def compute_stored_gather_bytes(facts: ModelFacts, candidate: Candidate, load: StageLoad) -> float:
    """Compute the bytes of all gathered parameters of a rank with frozen matrices in 4 bits,
    without those that are offloaded."""
    size = candidate.activation_bytes
    elements = count_rank_elements(facts, candidate, load)
    blocks = facts.count_elements(candidate.layout).sum_layers(load.layers)
    others = elements.local - blocks.local_matrices
    is_moved = candidate.parameter_offload != "none"
    matrices = blocks.local_matrices - is_moved * blocks.movable
    stored = candidate.engine.compute_quantised_weight_bytes(matrices, others, size)
    return stored + count_adapter_elements(facts, candidate, load).local * size


def compute_group_gather_bytes(facts: ModelFacts, candidate: Candidate, load: StageLoad) -> float:
    """Compute the same of the largest group of blocks that is gathered together."""
    largest = 0.0
    for index, count in enumerate(load.layers):
        if count:
            layers = tuple(int(each == index) for each in range(len(load.layers)))
            own = replace(load, layers=layers, has_embedding=False, has_head=False)
            largest = max(largest, compute_stored_gather_bytes(facts, candidate, own))
    return largest * min(candidate.layout.wrap_blocks, sum(load.layers))
