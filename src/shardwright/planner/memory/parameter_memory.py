"""Bytes of parameters on a rank: weights, gradients and optimizer states, and gathered copies.

Parts that persist between steps follow the trainer's `placement.build_parameter_layouts`.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import NamedTuple

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.element_counts import (
    count_group_elements,
    count_rank_elements,
    count_root_elements,
    count_trained_elements,
)
from shardwright.planner.memory.moved_weights import MovedWeights, compute_moved_weights
from shardwright.planner.memory.stage_load import StageLoad
from shardwright.planner.memory.state_memory import compute_state_bytes
from shardwright.planner.memory.stored_gathers import (
    compute_group_gather_bytes,
    compute_stored_gather_bytes,
)
from shardwright.planner.memory.weight_copies import casts_weights, count_cast_elements
from shardwright.planner.model_costs import (
    ModelFacts,
    ParameterElements,
)
from shardwright.planner.offload_costs import compute_device_buffer_bytes


class PersistentMemory(NamedTuple):
    """Bytes that persist between steps, and element counts for the peaks of a step."""

    weights: float
    gradients: float
    """Accumulated gradients of all micro-batches, unsharded or sharded according to the ZeRO
    stage."""
    reduced_gradients: float
    """Reduced gradient shard, next to the unsharded gradients that it is computed from."""
    updated_gradients: float
    """Gradients that the update reads and that are on the device."""
    optimizer: float
    parameters: ParameterElements
    trained_parameters: ParameterElements
    """Trained parameters whose gradients are on the device."""
    total_at_loss: float
    """Bytes at the loss without activations, but with gathered parameters: independent of
    micro-batch, recomputation and schedule."""
    offloaded: float = 0.0
    """Optimizer states in host memory or on disk, of which `optimizer` has the staging buffers."""
    moved: MovedWeights = MovedWeights()
    """Offloaded matrices of blocks, which are in no other part but `parameters`."""


def compute_persistent_memory(
    facts: ModelFacts, candidate: Candidate, load: StageLoad
) -> PersistentMemory:
    """Compute the memory of a rank that persists between steps."""
    engine = candidate.engine
    stage = candidate.layout.zero_stage
    parameters = count_rank_elements(facts, candidate, load)
    master = candidate.master_bytes
    trained = count_trained_elements(facts, candidate, load)
    moved = compute_moved_weights(facts, candidate, load.layers)
    weights = _compute_weight_bytes(facts, candidate, load, parameters, trained) - moved.weights
    if candidate.reference == "frozen":
        weights *= 2  # the reference is sharded like the model
    is_unsharded = engine.should_store_unsharded_gradients(
        stage, is_accumulated=candidate.gradient_accumulation_steps > 1
    )
    resident = trained
    if candidate.adapter is None and moved.stored:
        resident = trained._replace(
            local=trained.local - trained.movable, sharded=trained.sharded - trained.movable_sharded
        )
    unreduced = trained if candidate.has_offloaded_shards else resident
    accumulated = trained if candidate.has_resident_sums else resident
    gradient_bytes = _get_gradient_bytes(candidate, is_unsharded=is_unsharded)
    gradients = (unreduced.local if is_unsharded else accumulated.sharded) * gradient_bytes
    has_separate_shard = is_unsharded and stage >= 1 and engine.has_master_weights
    reduced = resident.sharded * master if has_separate_shard else 0.0
    updated = reduced or gradients
    if candidate.has_resident_sums:
        updated = resident.sharded * gradient_bytes
    optimizer = compute_state_bytes(facts, candidate, load, trained)
    offloaded = 0.0
    if candidate.offload in ("optimizer", "optimizer_disk"):
        offloaded = optimizer
        optimizer = compute_device_buffer_bytes(candidate, offloaded)
    elif candidate.offload == "parameters":
        weights = optimizer = gradients = updated = 0.0
        reduced = engine.has_device_gradient_shards * resident.sharded * gradient_bytes
    at_loss = weights + optimizer + compute_gradient_bytes_at_loss(candidate, gradients)
    if candidate.is_sharded:  # cast copies count with the micro-batches in flight
        at_loss += compute_gathered_bytes(
            facts, candidate, load, parameters, should_include_root=False
        )
    return PersistentMemory(
        weights,
        gradients,
        reduced,
        updated,
        optimizer,
        parameters,
        resident,
        at_loss,
        offloaded,
        moved,
    )


def _get_gradient_bytes(candidate: Candidate, *, is_unsharded: bool) -> float:
    """Return the bytes of an accumulated gradient."""
    if candidate.has_bf16_masters and is_unsharded and candidate.layout.zero_stage >= 1:
        return candidate.reduce_bytes  # FSDP2 accumulates in the reduction's precision
    return candidate.engine.get_gradient_bytes(candidate.master_bytes)


def _compute_weight_bytes(
    facts: ModelFacts,
    candidate: Candidate,
    load: StageLoad,
    parameters: ParameterElements,
    trained: ParameterElements,
) -> float:
    engine = candidate.engine
    layout = candidate.layout
    adapter = candidate.adapter
    elements = (
        parameters.sharded if layout.zero_stage >= engine.weight_shard_stage else parameters.local
    )
    if adapter is None:
        return elements * engine.get_weight_bytes(candidate.master_bytes)
    # Frozen weights are in the compute precision.
    size = candidate.activation_bytes
    if not adapter.quantised:
        frozen = elements * size + engine.compute_loading_bytes(
            parameters.local * size, layout.zero_stage
        )
    else:
        by_part = facts.count_elements(layout)
        matrices = sum(
            layer.local_matrices * count
            for layer, count in zip(by_part.layers, load.layers, strict=True)
        )
        for kind, count in zip(facts.kinds, load.layers, strict=True):
            unquantised = [
                product for product in kind.matmuls if product.role in adapter.unquantised
            ]
            matrices -= (
                count
                * sum(product.num_inputs * product.num_outputs for product in unquantised)
                / layout.tp
            )
        matrices *= elements / parameters.local if parameters.local else 0.0  # 0 without layers
        frozen = engine.compute_quantised_weight_bytes(matrices, elements - matrices, size)
    return (
        frozen
        + (trained.sharded if layout.zero_stage >= 1 else trained.local) * candidate.master_bytes
    )


def compute_gathered_bytes(
    facts: ModelFacts,
    candidate: Candidate,
    load: StageLoad,
    parameters: ParameterElements,
    *,
    should_include_root: bool,
    num_pending: int | None = None,
) -> float:
    """Compute the bytes of gathered or cast parameters in the compute precision.

    `num_pending` layers have not finished their backward pass; None if no layer has begun it. Only
    groups of pending layers are gathered.
    """
    layout = candidate.layout
    engine = candidate.engine
    size = engine.get_gather_bytes(candidate.activation_bytes)
    dequantised_bytes = 0.0
    is_quantised = candidate.adapter is not None and candidate.adapter.quantised
    if is_quantised:
        # A quantised matrix is dequantised for its matmul, one at a time.
        if not engine.has_ordered_frees:
            elements = (p.num_inputs * p.num_outputs for k in facts.kinds for p in k.matmuls)
            dequantised_bytes = max(elements, default=0.0) / layout.tp * size
        elif layout.zero_stage < 3 and candidate.is_sharded:
            return compute_stored_gather_bytes(facts, candidate, load)
        if layout.zero_stage < 3:
            return dequantised_bytes
    has_shards = candidate.has_offloaded_shards
    is_moved = candidate.parameter_offload != "none" and not has_shards
    root_bytes = 0.0
    if should_include_root:
        # Without sharding the embedding's table is not cast: only its rows are.
        root = load if candidate.is_sharded else replace(load, has_embedding=False)
        root_bytes = count_root_elements(facts, candidate, root) * size
    if (layout.zero_stage == 3 or has_shards) and candidate.is_sharded:
        num_layers = sum(load.layers) if num_pending is None else num_pending
        groups = min(1 + layout.num_gathers_ahead, -(-num_layers // layout.wrap_blocks) or 1)
        group_elements = count_group_elements(
            facts, candidate, load, should_skip_moved=not has_shards
        )
        by_layer = facts.count_elements(layout).layers
        largest = max(
            (layer for layer, count in zip(by_layer, load.layers, strict=True) if count),
            default=ParameterElements(),
        )
        if layout.zero_stage < 3:  # the root's stay gathered
            root_bytes = count_root_elements(facts, candidate, load) * size
        gathered = groups * group_elements * candidate.get_gather_bytes(largest) + root_bytes
        if is_quantised and engine.has_ordered_frees:
            return root_bytes + groups * compute_group_gather_bytes(facts, candidate, load)
        return is_moved * dequantised_bytes + max(
            gathered, engine.count_live_elements(parameters.local) * size
        )
    if not engine.has_master_weights:
        return 0.0
    if candidate.is_sharded:
        num_elements = parameters.local - is_moved * parameters.movable
        return num_elements * candidate.get_gather_bytes(parameters)
    if not casts_weights(candidate):
        return 0.0
    # Casts are saved for the backward pass with the activations of their layer, once per
    # micro-batch in flight. Under recomputation, which repeats them, only those of one layer
    # exist.
    if engine.should_recompute_casts(candidate.recompute):
        group = count_group_elements(facts, candidate, load)
        saved = count_cast_elements(facts, candidate, load, parameters) * load.num_in_flight
        return (group + saved) * size + root_bytes
    saved = count_cast_elements(facts, candidate, load, parameters) * load.num_in_flight
    resident = load.count_resident_layers(candidate)
    if resident != inf:
        saved = min(saved, resident * count_group_elements(facts, candidate, load))
    return saved * size + root_bytes


def compute_gradient_bytes_at_loss(candidate: Candidate, gradients: float) -> float:
    """Compute gradient bytes of earlier micro-batches, and of buffers that persist for the
    whole run."""
    is_accumulated = has_earlier_gradients(candidate)
    has_buckets = _has_buckets(candidate)
    if is_accumulated and has_buckets and candidate.engine.has_master_weights:
        return 2.0 * gradients  # DDP accumulates earlier micro-batches outside its buckets
    has_buffers = is_accumulated or has_buckets or candidate.engine.has_gradient_buffers
    return gradients if has_buffers else 0.0


def has_earlier_gradients(candidate: Candidate) -> bool:
    """Return True if earlier micro-batches have left gradients when most activations are saved.

    GPipe saves those of all micro-batches before the first backward pass.
    """
    layout = candidate.layout
    is_gpipe = layout.pp > 1 and layout.schedule == "gpipe"
    return candidate.gradient_accumulation_steps > 1 and not is_gpipe


def _has_buckets(candidate: Candidate) -> bool:
    """Return True if gradients are views of persistent buckets (DDP)."""
    layout = candidate.layout
    sums_stages = candidate.engine.sums_whole_stages and layout.pp > 1
    return layout.zero_stage == 0 and layout.dp_replicate * layout.fsdp > 1 and not sums_stages


def compute_reduction_bytes(
    candidate: Candidate, num_elements: float, *, is_accumulated: bool = False
) -> float:
    """Compute bytes of a group's gradients in reduction: in the compute precision, and a copy
    in the reduction's precision. `is_accumulated`: `has_last_reduction`."""
    if candidate.adapter is not None:
        return 0.0
    if candidate.is_sharded:
        gather_bytes = candidate.engine.get_gather_bytes(candidate.activation_bytes)
        if is_accumulated:  # those of the pass have been added to whole ones
            gather_bytes = 0.0
        return num_elements * (gather_bytes + candidate.reduce_bytes)
    if not _has_buckets(candidate):
        return 0.0
    bucket_bytes = candidate.layout.bucket_size_bytes
    if candidate.has_bf16_masters and not candidate.should_reduce_in_bf16:
        return min(8.0 * bucket_bytes, num_elements * candidate.reduce_bytes)
    if candidate.should_reduce_in_bf16 and not candidate.has_bf16_masters:
        return 2.0 * bucket_bytes
    return 0.0


def compute_pending_reduction_bytes(candidate: Candidate, num_elements: float) -> float:
    """Compute bytes of a group's gradients during the reduction, after their original is
    freed."""
    if candidate.is_sharded and candidate.adapter is None:
        return num_elements * candidate.reduce_bytes
    return compute_reduction_bytes(candidate, num_elements)


def has_last_reduction(candidate: Candidate, persistent: PersistentMemory) -> bool:
    """Return True if FSDP2 adds up whole gradients and reduces them in the last micro-batch: then
    those of each group become a shard."""
    is_accumulated = candidate.gradient_accumulation_steps > 1
    is_followed = candidate.engine.has_ordered_frees and candidate.is_sharded
    return is_followed and is_accumulated and persistent.reduced_gradients > 0.0


def compute_partly_reduced_bytes(
    facts: ModelFacts,
    candidate: Candidate,
    load: StageLoad,
    persistent: PersistentMemory,
    num_groups: int | None = None,
) -> float:
    """Compute the bytes of gradients where FSDP2 has reduced those of one group to shards, or of
    all but so many groups and the root (`has_last_reduction`). Layers that differ count as the
    smallest group, or the largest."""
    num_elements = persistent.gradients / _get_gradient_bytes(candidate, is_unsharded=True)
    if num_groups is None:
        num_reduced = count_group_elements(
            facts, candidate, load, should_skip_frozen=True, is_smallest=True
        )
    else:
        group = count_group_elements(facts, candidate, load, should_skip_frozen=True)
        root = count_root_elements(facts, candidate, load, should_skip_frozen=True)
        num_reduced = max(0.0, num_elements - root - num_groups * group)
    share = num_reduced / num_elements
    return (1.0 - share) * persistent.gradients + share * persistent.reduced_gradients


def compute_pending_gradient_bytes(
    facts: ModelFacts,
    candidate: Candidate,
    load: StageLoad,
    persistent: PersistentMemory,
    *,
    num_groups: int = 1,
) -> float:
    """Compute gradient bytes not yet allocated at the peak of an early layer's backward pass:
    those of the first `num_groups` groups of layers that have any, and the embedding's.

    Zero if gradients of earlier micro-batches or buckets exist already.
    """
    if (
        compute_gradient_bytes_at_loss(candidate, persistent.gradients)
        or not persistent.trained_parameters.local
    ):
        return 0.0
    by_part = facts.count_elements(candidate.layout, should_skip_frozen=True)
    pending = _count_pending_elements(facts, candidate, load, num_groups)
    pending += 0.0 if facts.shape.tied_embeddings else by_part.embedding.local
    return candidate.engine.compute_pending_gradient_bytes(
        persistent.gradients * min(1.0, pending / persistent.trained_parameters.local)
    )


def _count_pending_elements(
    facts: ModelFacts, candidate: Candidate, load: StageLoad, num_groups: int
) -> float:
    """Count the trained elements on the device of the first groups of layers that have any.

    Each counts as the largest, unless parameters are frozen: then layers may differ much. Those of
    a pipeline stage, whose order is not known, count as the smallest.
    """
    if not facts.frozen_names:
        return num_groups * count_group_elements(facts, candidate, load, should_skip_moved=True)
    moved_share = candidate.parameter_offload != "none"
    trained = facts.count_elements(candidate.layout, should_skip_frozen=True).layers
    by_slot = {
        kind.slot: layer.local - moved_share * layer.movable
        for kind, layer, count in zip(facts.kinds, trained, load.layers, strict=True)
        if count and kind.has_backward
    }
    num_layers = min(num_groups * candidate.layout.wrap_blocks, sum(load.layers))
    slots = [slot for slot in facts.slot_of_layer if slot in by_slot]
    if sum(load.layers) == len(facts.slot_of_layer):
        return sum(by_slot[slot] for slot in slots[:num_layers])
    return num_layers * min(by_slot.values(), default=0.0)
