"""Bytes of the optimizer states of a rank."""

from __future__ import annotations

from math import prod

from shardwright.planner.candidate import Candidate
from shardwright.planner.engine_model import OPTIMIZER_COSTS
from shardwright.planner.memory.stage_load import StageLoad
from shardwright.planner.model_costs import ModelFacts, ParameterElements


def compute_state_bytes(
    facts: ModelFacts, candidate: Candidate, load: StageLoad, trained: ParameterElements
) -> float:
    """Compute the bytes of the optimizer states of a rank's trained parameters, and of master
    weights in addition to the weights."""
    if candidate.optimizer == "adafactor" and candidate.engine.has_ordered_frees:
        return candidate.master_bytes * _count_factored_elements(facts, candidate, load, trained)
    is_sharded = candidate.layout.zero_stage >= 1
    num_elements = trained.sharded if is_sharded else trained.local
    state_bytes = num_elements * candidate.engine.get_optimizer_bytes(
        candidate.optimizer, candidate.master_bytes
    )
    if candidate.optimizer == "adamw_8bit":  # each moment has an fp32 scale per block
        state_bytes += 8.0 * num_elements * (1 / candidate.scale_block_size - 1 / 256)
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


def _count_factored_elements(
    facts: ModelFacts, candidate: Candidate, load: StageLoad, trained: ParameterElements
) -> float:
    """Count the elements of Adafactor's states: one per row and column of each whole matrix, of
    every expert too, on all ranks that have a part of it; and one per element of other parameters,
    which are sharded."""
    vectors = _count_vector_elements(facts, candidate, load, trained)
    if candidate.adapter is not None:
        return vectors + _count_adapter_edges(facts, candidate, load)
    by_layer = [0.0] * len(facts.kinds)
    others = 0.0
    for spec in facts.trained_parameters:
        if len(spec.shape) < 2:
            continue
        *stack, rows, columns = spec.shape
        edges = float(prod(stack) * (rows + columns))
        is_embedding = spec.role in ("embedding", "positions")
        if spec.layer is not None:
            by_layer[spec.layer] += edges
        elif (load.has_embedding and is_embedding) or (
            load.has_head and (not is_embedding or facts.shape.tied_embeddings)
        ):
            others += edges
    return (
        vectors
        + others
        + sum(edges * count for edges, count in zip(by_layer, load.layers, strict=True))
    )


def _count_vector_elements(
    facts: ModelFacts, candidate: Candidate, load: StageLoad, trained: ParameterElements
) -> float:
    """Count the trained elements of a rank that are in no matrix."""
    parts = [trained]
    if candidate.adapter is None:
        elements = facts.count_elements(candidate.layout, should_skip_frozen=True)
        parts = [elements.sum_layers(load.layers)]
        parts += [elements.head] if load.has_head else []
    return sum(
        (part.local - part.local_matrices)
        * (part.sharded / part.local if candidate.layout.zero_stage and part.local else 1.0)
        for part in parts
    )


def _count_adapter_edges(facts: ModelFacts, candidate: Candidate, load: StageLoad) -> float:
    """Count the rows and columns of all matrices A [rank, in] and B [out, rank] of a rank."""
    adapter = candidate.adapter
    assert adapter is not None
    total = 0.0
    for kind, count in zip(facts.kinds, load.layers, strict=True):
        for product in (*kind.matmuls, *kind.expert_matmuls):
            if product.role in adapter.roles:
                edges = product.num_inputs + product.num_outputs + 2 * adapter.rank
                total += count * edges * facts.count_local_matrices(kind, product, ep=1)
    return total
