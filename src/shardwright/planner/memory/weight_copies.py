"""Bytes of weights in the compute precision on a rank: casts that passes save, and working weights
that persist between steps."""

from __future__ import annotations

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.element_counts import (
    count_adapter_elements,
    count_group_elements,
    count_root_elements,
)
from shardwright.planner.memory.first_layer import count_unread_elements
from shardwright.planner.memory.moved_weights import compute_moved_weights
from shardwright.planner.memory.stage_load import StageLoad
from shardwright.planner.model_costs import (
    LayerKind,
    ModelFacts,
    ParameterElements,
    get_layer_recompute,
)


def compute_saved_cast_bytes(
    facts: ModelFacts,
    candidate: Candidate,
    load: StageLoad,
    parameters: ParameterElements,
    num_passes: float,
) -> float:
    """Compute the bytes of casts of replicated weights that so many passes have saved."""
    if not casts_weights(candidate):
        return 0.0
    saved = count_cast_elements(facts, candidate, load, parameters) * num_passes
    return saved * candidate.engine.get_gather_bytes(candidate.activation_bytes)


def count_cast_elements(
    facts: ModelFacts, candidate: Candidate, load: StageLoad, parameters: ParameterElements
) -> float:
    """Count the elements of the layers' matrices whose casts are saved."""
    elements = facts.count_elements(candidate.layout).layers
    if candidate.engine.should_recompute_casts(candidate.recompute):
        return sum(
            layer.local_matrices * count
            for kind, layer, count in zip(facts.kinds, elements, load.layers, strict=True)
            if has_saved_casts(candidate, kind)
        )
    unsaved = sum(
        layer.local_matrices * count
        for kind, layer, count in zip(facts.kinds, elements, load.layers, strict=True)
        if not kind.has_backward
    )
    if candidate.layout.pp == 1:
        unsaved += count_unread_elements(facts, candidate)
    root = count_root_elements(facts, candidate, load)
    return max(0.0, parameters.local_matrices - root - unsaved)


def compute_working_bytes(
    facts: ModelFacts,
    candidate: Candidate,
    load: StageLoad,
    *,
    has_codes: bool = True,
    should_skip_frozen: bool = False,
) -> float:
    """Compute the bytes of copies in the compute precision that persist between steps: of the
    layers' matrices and the head, of adapters, or of the shards that leave the device.

    False for `has_codes` leaves out codes. `should_skip_frozen` leaves out copies that no update
    changes.
    """
    if not candidate.has_working_weights:
        return 0.0
    size = candidate.engine.get_gather_bytes(candidate.activation_bytes)
    if candidate.adapter is not None:
        return count_adapter_elements(facts, candidate, load).local_matrices * size
    if candidate.has_offloaded_shards:
        moved = compute_moved_weights(facts, candidate, load.layers)
        copied = moved.gradients if should_skip_frozen else moved.weights
        return copied / candidate.master_bytes * size
    elements = facts.count_elements(candidate.layout, should_skip_frozen=should_skip_frozen)
    shares = candidate.quantised_shares
    dense_bytes, expert_bytes = (
        size
        if shares is None
        else shares.get_working_bytes(size, is_expert=is_expert)
        - (0.0 if has_codes else shares.get_code_bytes(is_expert=is_expert))
        for is_expert in (False, True)
    )
    total = sum(
        count
        * (
            (layer.local_matrices - layer.expert_local) * dense_bytes
            + layer.expert_local * expert_bytes
        )
        for layer, count in zip(elements.layers, load.layers, strict=True)
    )
    if load.has_head and (facts.head.is_trained or not should_skip_frozen):
        total += facts.shape.vocab_size * facts.shape.hidden_size / candidate.layout.tp * size
    return total


def has_saved_casts(candidate: Candidate, kind: LayerKind) -> bool:
    """Return True if each micro-batch saves a layer's casts of replicated weights."""
    return (
        kind.has_backward
        and casts_weights(candidate)
        and not candidate.engine.should_recompute_casts(
            get_layer_recompute(kind, candidate.recompute)
        )
    )


def casts_weights(candidate: Candidate) -> bool:
    """Return True if replicated weights are cast to the compute precision at each use."""
    engine = candidate.engine
    return (
        engine.has_master_weights
        and not candidate.is_sharded
        and candidate.adapter is None
        and not candidate.has_working_weights
        and engine.get_gather_bytes(candidate.activation_bytes) != candidate.master_bytes
    )


def compute_offloaded_cast_bytes(
    facts: ModelFacts, candidate: Candidate, load: StageLoad, parameters: ParameterElements
) -> float:
    """Compute the bytes of cast weights that have left the device with a layer's saved
    tensors: all but those of the last layer."""
    if candidate.activation_offload == "none" or not casts_weights(candidate):
        return 0.0
    saved = count_cast_elements(facts, candidate, load, parameters) * load.num_in_flight
    remaining = saved - count_group_elements(facts, candidate, load)
    return max(0.0, remaining) * candidate.engine.get_gather_bytes(candidate.activation_bytes)
