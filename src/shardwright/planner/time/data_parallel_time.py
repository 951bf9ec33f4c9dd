"""Seconds of data-parallel communication in a step: exposed, and overlapped with compute."""

from __future__ import annotations

from dataclasses import replace

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.element_counts import count_trained_elements
from shardwright.planner.memory.stage_load import StageLoad
from shardwright.planner.model_costs import ParameterElements, ParameterElementsByPart
from shardwright.planner.time.communication import NetworkModel
from shardwright.planner.time.maxima_exchanges import compute_shard_maxima_seconds
from shardwright.planner.time.step_costs import StepCosts
from shardwright.planner.time.traffic import (
    DataTraffic,
    compute_data_traffic,
    compute_owner_traffic,
)


def _sum_rank_parameters(
    costs: StepCosts, load: StageLoad, by_part: ParameterElementsByPart
) -> tuple[ParameterElements, ParameterElements, ParameterElements]:
    """Return a rank's parameters, all or trained ones: all its layers, one group of them, and
    embedding and head."""
    facts = costs.facts
    group = ParameterElements()
    for layer, count in zip(by_part.layers, load.layers, strict=True):
        if count and layer.local > group.local:
            group = layer
    ends = ParameterElements()
    if load.has_embedding or (load.has_head and facts.shape.tied_embeddings):
        ends = ends.add(by_part.embedding)
    if load.has_head:
        ends = ends.add(by_part.head)
    return (
        by_part.sum_layers(load.layers),
        group.multiply(min(costs.candidate.layout.wrap_blocks, max(1, sum(load.layers)))),
        ends,
    )


def count_updated_elements(costs: StepCosts, load: StageLoad) -> float:
    """Count the parameters that the rank updates."""
    trained = count_trained_elements(costs.facts, costs.candidate, load)
    return trained.sharded if costs.candidate.layout.zero_stage >= 1 else trained.local


def count_first_elements(costs: StepCosts, load: StageLoad) -> float:
    """Count the updated parameters that are used first: those of an embedding and of a layer.

    With ZeRO embedding and head are gathered together.
    """
    num_layers = max(1, sum(load.layers))
    if costs.candidate.adapter is not None:
        return count_updated_elements(costs, load) / num_layers
    trained = costs.facts.count_elements(costs.candidate.layout, should_skip_frozen=True)
    layers, _, ends = _sum_rank_parameters(costs, load, trained)
    if costs.candidate.is_sharded:
        return layers.sharded / num_layers + ends.sharded
    embedding = trained.embedding
    return layers.local / num_layers + load.has_embedding * embedding.local


class RankTraffic:
    """Cached data-parallel communication and numbers of updated parameters of ranks, by load: of
    candidates that do not differ in what both depend on."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], tuple[DataTraffic, float]] = {}

    def get(self, costs: StepCosts, load: StageLoad) -> tuple[DataTraffic, float]:
        """Return `compute_rank_traffic` and `count_updated_elements`."""
        key = (load.layers, load.has_embedding, load.has_head)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = (
                compute_rank_traffic(costs, load),
                count_updated_elements(costs, load),
            )
        return found


def compute_rank_traffic(costs: StepCosts, load: StageLoad) -> DataTraffic:
    """Compute the data-parallel communication of a stage. Zero with one data rank."""
    candidate = costs.candidate
    network = costs.network
    layout = costs.candidate.layout
    if layout.dp_replicate * layout.fsdp == 1:
        return DataTraffic()
    parts = _sum_rank_parameters(costs, load, costs.facts.count_elements(layout))
    num_tensors = sum(
        count * kind.num_tensors for count, kind in zip(load.layers, costs.facts.kinds, strict=True)
    )
    num_groups = candidate.engine.count_gather_groups(
        num_block_groups=-(-sum(load.layers) // layout.wrap_blocks), num_tensors=num_tensors
    )
    if candidate.adapter is not None:
        adapters = count_trained_elements(costs.facts, candidate, load)
        if candidate.parameter_offload != "none":  # gathered when they arrive
            parts = (_drop_movable(parts[0]), _drop_movable(parts[1]), parts[2])
        frozen = (
            parts
            if layout.zero_stage == 3
            else (ParameterElements(), ParameterElements(), ParameterElements())
        )
        gathers = compute_data_traffic(frozen, num_groups, candidate, network, costs.groups)
        reductions = compute_data_traffic(
            (adapters, ParameterElements(), ParameterElements()),
            num_groups,
            candidate,
            network,
            costs.groups,
        )
        return DataTraffic(
            gathers.gather_seconds,
            reductions.reduce_seconds,
            gathers.first_gather_seconds,
            reductions.last_reduce_seconds,
            reductions.replica_reduce_seconds,
            reductions.idle_share,
        )
    if layout.zero_stage == 1 and candidate.engine.has_owner_broadcasts:
        return compute_owner_traffic(parts, num_tensors, candidate, network, costs.groups)
    maxima_seconds = compute_shard_maxima_seconds(
        costs.facts, load, candidate, network, costs.groups["fsdp"]
    )
    traffic = compute_data_traffic(parts, num_groups, candidate, network, costs.groups)
    if costs.facts.frozen_names:
        traffic = _leave_out_frozen(costs, load, parts, traffic)
    return replace(traffic, maxima_seconds=maxima_seconds)


def _leave_out_frozen(
    costs: StepCosts,
    load: StageLoad,
    parts: tuple[ParameterElements, ParameterElements, ParameterElements],
    traffic: DataTraffic,
) -> DataTraffic:
    """Return the communication without reductions of frozen parameters, and without gathers in
    backward passes of layers that have none.

    Groups are gathered whole, whether a part of them is frozen or not.
    """
    candidate = costs.candidate
    wrap_blocks = candidate.layout.wrap_blocks
    facts = costs.facts
    trained = _sum_rank_parameters(
        costs, load, facts.count_elements(candidate.layout, should_skip_frozen=True)
    )
    layers = facts.count_elements(candidate.layout).layers
    counted = list(zip(facts.kinds, layers, load.layers, strict=True))
    num_backward = sum(count for kind, _, count in counted if kind.has_backward)
    reductions = compute_data_traffic(
        trained, -(-num_backward // wrap_blocks), candidate, costs.network, costs.groups
    )
    last_reduce_seconds = reductions.last_reduce_seconds
    if candidate.is_sharded and not trained[2].local:
        # The root has nothing to reduce: the last reduction is that of a group.
        last_reduce_seconds = reductions.reduce_seconds / max(1, -(-num_backward // wrap_blocks))
    # Groups are gathered ahead of backward passes that do not come.
    num_frozen = sum(load.layers) - num_backward
    num_ahead = min(num_frozen, candidate.layout.num_gathers_ahead * wrap_blocks)
    share_ahead = num_ahead / max(1, num_frozen)
    gathered = sum(
        count * layer.local * (1.0 if kind.has_backward else share_ahead)
        for kind, layer, count in counted
    )
    return replace(
        traffic,
        reduce_seconds=reductions.reduce_seconds,
        last_reduce_seconds=last_reduce_seconds,
        replica_reduce_seconds=reductions.replica_reduce_seconds,
        idle_share=reductions.idle_share,
        backward_gather_share=gathered / max(1.0, parts[0].local),
    )


def _drop_movable(elements: ParameterElements) -> ParameterElements:
    return ParameterElements(
        elements.local - elements.movable, elements.sharded - elements.movable_sharded
    )


def overlap_traffic(
    candidate: Candidate,
    network: NetworkModel,
    traffic: DataTraffic,
    num_micro_batches: int,
    forward_seconds: float,
    backward_seconds: float,
) -> tuple[float, float]:
    """Return exposed and overlapped seconds of `traffic` in a step of `num_micro_batches`
    micro-batches with passes of this length."""
    stage = candidate.layout.zero_stage
    share = max(network.efficiency.data_overlap, traffic.idle_share)
    sharded = candidate.is_sharded
    gathers_each_pass = candidate.gathers_each_pass
    gathers_forward = num_micro_batches if gathers_each_pass else 1 if sharded else 0
    gathers_backward = num_micro_batches if gathers_each_pass else 0
    reduces_always = sharded and candidate.engine.should_reduce_each_micro_batch(stage)
    reductions = num_micro_batches if reduces_always else 1
    exposed = traffic.maxima_seconds
    hidden = 0.0

    def overlap(window: float, seconds: float, exposed_part: float, num_passes: int) -> None:
        nonlocal exposed, hidden
        covered = min(share * seconds, max(0.0, window), max(0.0, seconds - exposed_part))
        exposed += num_passes * (seconds - covered)
        hidden += num_passes * covered

    if gathers_forward:
        overlap(
            forward_seconds, traffic.gather_seconds, traffic.first_gather_seconds, gathers_forward
        )
    # The last backward pass also overlaps with the reduction over replicas, the others (stage
    # 3, or 2) with their own gathers and reductions.
    gather = 0.0
    if gathers_backward:
        gather = traffic.gather_seconds - traffic.first_gather_seconds
        gather *= traffic.backward_gather_share
    if reductions > 1:
        overlap(
            backward_seconds,
            gather + traffic.reduce_seconds,
            traffic.last_reduce_seconds,
            reductions - 1,
        )
    elif gathers_backward > 1:
        overlap(backward_seconds, gather, 0.0, gathers_backward - 1)
    overlap(
        backward_seconds,
        gather + traffic.reduce_seconds + traffic.replica_reduce_seconds,
        traffic.last_reduce_seconds,
        1,
    )
    return exposed, hidden
