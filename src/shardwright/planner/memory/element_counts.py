"""Numbers of parameters on a rank: of all, of trained ones, and of groups that are gathered."""

from __future__ import annotations

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.stage_load import StageLoad
from shardwright.planner.model_costs import (
    ModelFacts,
    ParameterElements,
    ParameterElementsByPart,
)


def count_rank_elements(
    facts: ModelFacts, candidate: Candidate, load: StageLoad
) -> ParameterElements:
    """Count the elements of a rank's parameters, without adapters."""
    return _sum_parameters(facts, facts.count_elements(candidate.layout), load)


def count_trained_elements(
    facts: ModelFacts, candidate: Candidate, load: StageLoad
) -> ParameterElements:
    """Count the elements of a rank's trained parameters: those of adapters, or all that are not
    frozen."""
    if candidate.adapter is not None:
        return count_adapter_elements(facts, candidate, load)
    elements = facts.count_elements(candidate.layout, should_skip_frozen=True)
    return _sum_parameters(facts, elements, load)


def _sum_parameters(
    facts: ModelFacts, elements: ParameterElementsByPart, load: StageLoad
) -> ParameterElements:
    total = elements.sum_layers(load.layers)
    if load.has_embedding or (load.has_head and facts.shape.tied_embeddings):
        total = total.add(elements.embedding)
    return total.add(elements.head) if load.has_head else total


def count_adapter_elements(
    facts: ModelFacts, candidate: Candidate, load: StageLoad
) -> ParameterElements:
    """Count the elements of a rank's low-rank matrices A [rank, in] and B [out, rank], and of
    magnitudes [out], sharded like their matrix."""
    adapter = candidate.adapter
    layout = candidate.layout
    assert adapter is not None
    total = ParameterElements()
    for kind, count in zip(facts.kinds, load.layers, strict=True):
        for product in (*kind.matmuls, *kind.expert_matmuls):
            if product.role not in adapter.roles:
                continue
            num_in = product.num_inputs / (layout.tp if product.sharding == "rows" else 1)
            num_out = product.num_outputs / (layout.tp if product.sharding == "columns" else 1)
            shards = layout.fsdp if layout.zero_stage >= 1 else 1
            if product in kind.expert_matmuls:  # the ranks that have the same experts
                shards = max(1, shards // layout.ep)
            width = adapter.rank + adapter.has_magnitudes  # of a row of B, with its magnitude
            matrices = adapter.rank * (num_in + num_out)
            local = matrices + adapter.has_magnitudes * num_out
            shard = -(-adapter.rank // shards) * num_in + -(-num_out // shards) * width
            num_matrices = facts.count_local_matrices(kind, product, layout.ep)
            total = total.add(
                ParameterElements(local, shard, local_matrices=matrices).multiply(
                    count * num_matrices
                )
            )
    return total


def count_group_elements(
    facts: ModelFacts,
    candidate: Candidate,
    load: StageLoad,
    *,
    should_skip_moved: bool = False,
    should_skip_frozen: bool = False,
    is_smallest: bool = False,
) -> float:
    """Count the elements of the largest group of blocks that is gathered together, or of the
    smallest one.

    `should_skip_moved` leaves out weights that are offloaded, `should_skip_frozen` frozen ones,
    which have no gradient to reduce.
    """
    by_part = facts.count_elements(candidate.layout, should_skip_frozen=should_skip_frozen)
    moved_share = should_skip_moved and candidate.parameter_offload != "none"
    present = [
        layer.local - moved_share * layer.movable
        for layer, count in zip(by_part.layers, load.layers, strict=True)
        if count
    ]
    choose = min if is_smallest else max
    return choose(present, default=0.0) * min(candidate.layout.wrap_blocks, sum(load.layers))


def count_root_elements(
    facts: ModelFacts, candidate: Candidate, load: StageLoad, *, should_skip_frozen: bool = False
) -> float:
    """Count the elements gathered with the root module: embedding and head of the stage."""
    by_part = facts.count_elements(candidate.layout, should_skip_frozen=should_skip_frozen)
    elements = (
        by_part.embedding.local
        if load.has_embedding or (load.has_head and facts.shape.tied_embeddings)
        else 0.0
    )
    return elements + (by_part.head.local if load.has_head else 0.0)
