"""Bytes on the rank with the most memory, by part, at the possible peaks of a step.

    loss      all activations in flight are saved; the loss has its logits, and one group of
              parameters is gathered beyond what the backward pass needs
    backward  most activations are freed, gradients are complete, reduction buffers are in use
    embedding the last layer of a pass is freed, the embedding's gradient is added
    update    no activations; optimizer states and working weights, as at all times. Stages 1 and 2
              gather parameters for the next step, but without the whole gradients that
              exist when they are gathered in the backward pass: it is larger

`planner.memory.parameter_memory` has the parts that persist between steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.activations import compute_quantising_bytes
from shardwright.planner.memory.backward_peak import compute_norm_gradient_bytes
from shardwright.planner.memory.element_counts import count_group_elements, count_root_elements
from shardwright.planner.memory.end_activations import compute_logit_bytes
from shardwright.planner.memory.forward_peak import list_forward_peaks
from shardwright.planner.memory.live_activations import (
    LiveActivations,
    compute_live_activations,
    should_count_gathers,
)
from shardwright.planner.memory.parameter_memory import (
    PersistentMemory,
    compute_gathered_bytes,
    compute_gradient_bytes_at_loss,
    compute_partly_reduced_bytes,
    compute_pending_gradient_bytes,
    compute_pending_reduction_bytes,
    compute_persistent_memory,
    compute_reduction_bytes,
    has_earlier_gradients,
    has_last_reduction,
)
from shardwright.planner.memory.pipeline_peaks import list_pass_peaks
from shardwright.planner.memory.stage_load import StageLoad
from shardwright.planner.memory.update_peak import compute_update_peak
from shardwright.planner.memory.weight_copies import (
    compute_offloaded_cast_bytes,
    compute_working_bytes,
    has_saved_casts,
)
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.offload_costs import compute_weight_staging_bytes, sum_tier_bytes
from shardwright.planner.prediction import MemoryParts
from shardwright.planner.rates.efficiency import Efficiency


def predict_memory(
    facts: ModelFacts,
    candidate: Candidate,
    load: StageLoad,
    efficiency: Efficiency,
    persistent: PersistentMemory | None = None,
) -> MemoryParts:
    """Compute the bytes of one rank, by part, at its peak. Pass `persistent` if it is already
    known."""
    persistent = persistent or compute_persistent_memory(facts, candidate, load)
    live = compute_live_activations(facts, candidate, load)
    # With offloaded trained weights passes are followed only where stages differ: how many blocks'
    # weights and gradients are on the device depends on the moment.
    is_moving = live.is_offloaded or (candidate.offloads_trained_weights and not facts.frozen_names)
    list_peaks = list_pass_peaks if load.passes and not is_moving else _list_step_peaks
    moments = (
        *list_peaks(facts, candidate, load, persistent, live),
        *_list_embedding_peaks(facts, candidate, load, persistent, live),
        compute_update_peak(candidate, persistent),
    )
    peak = max(moments, key=lambda parts: parts.total)
    # At every moment. Not of `persistent`, which does not depend on micro-batches and recompute.
    peak = replace(peak, weights=peak.weights + compute_working_bytes(facts, candidate, load))
    driver = efficiency.context_bytes + efficiency.communicator_bytes * _count_process_groups(
        candidate
    )
    reserve = (
        efficiency.reserve_share * peak.total
        + efficiency.reserve_bytes
        + candidate.engine.compute_late_allocation_bytes(
            candidate.layout,
            persistent.trained_parameters,
            gradient_bytes=persistent.gradients,
            peak_gradient_bytes=peak.gradients,
            peak_logit_bytes=peak.logits,
        )
    )
    tiers = sum_tier_bytes(
        candidate,
        optimizer=persistent.offloaded,
        parameters=persistent.moved.stored,
        activations=live.compute_offloaded_bytes(load)
        + compute_offloaded_cast_bytes(facts, candidate, load, persistent.parameters),
        staged_weights=compute_weight_staging_bytes(candidate, persistent.moved.gradients),
    )
    return replace(peak, reserve=reserve, driver=driver, **tiers)


def _list_step_peaks(
    facts: ModelFacts,
    candidate: Candidate,
    load: StageLoad,
    persistent: PersistentMemory,
    live: LiveActivations,
) -> list[MemoryParts]:
    """Return memory at the loss, in the last backward passes, and in forward passes that save
    nothing, of a rank whose stages count as equal."""
    last_passes = live.list_last_backward_passes(load)
    if not has_earlier_gradients(candidate) and load.num_in_flight > 1.0:
        # The first backward pass leaves the gradients to which the second one adds.
        second = replace(load, num_in_flight=load.num_in_flight - 1.0)
        remaining = compute_live_activations(facts, candidate, second)
        saved = remaining.compute_saved_bytes(second.num_in_flight)
        whole = (sum(load.layers), saved + live.recomputed_bytes + live.gradient_bytes)
        last_passes = [whole, *remaining.list_last_backward_passes(second)]
    return [
        _compute_loss_peak(facts, candidate, load, persistent, live),
        *(
            _compute_backward_peak(facts, candidate, load, persistent, live, *moment)
            for moment in last_passes
        ),
        *list_forward_peaks(facts, candidate, load, persistent, live),
    ]


def _count_process_groups(candidate: Candidate) -> int:
    layout = candidate.layout
    degrees = (
        layout.pp,
        layout.dp_replicate,
        layout.fsdp if layout.zero_stage else 1,
        layout.cp,
        layout.tp,
        layout.ep,
    )
    return sum(degree > 1 for degree in degrees) + candidate.engine.count_other_communicators(
        layout
    )


class _Moment(NamedTuple):
    """Bytes at one moment, and numbers of blocks with offloaded weights, and with their gradients,
    on the device."""

    activations: float
    logits: float
    num_blocks: tuple[float, float]
    has_root: bool = False
    """True if the root's parameters are gathered."""
    workspaces: float = 0.0
    gradient_share: float = 1.0
    """Share of the gradients that exist, if earlier micro-batches have left any."""


def _compute_loss_peak(
    facts: ModelFacts,
    candidate: Candidate,
    load: StageLoad,
    persistent: PersistentMemory,
    live: LiveActivations,
) -> MemoryParts:
    """Return the largest of: the loss with its logits, the first layer of the backward pass,
    and the first reduction after it."""
    layout = candidate.layout
    saved = live.compute_saved_bytes(load.num_in_flight)
    logits, remaining = compute_logit_bytes(facts, candidate) if load.has_head else (0.0, 0.0)
    gradients = compute_gradient_bytes_at_loss(candidate, persistent.gradients)
    is_accumulated = candidate.gradient_accumulation_steps > 1
    # Blocks with offloaded weights on the device, and blocks with their gradients. The next block
    # after the loss is the last one again, but in a pipeline another one. At stage 1, and with
    # replicas, none return: whole ones, or sums, never left. Shards return for a reduction, after
    # the backward pass of their block has begun. Under I none are used: those of the last W leave,
    # or those of the next one return.
    has_shards = candidate.has_offloaded_shards
    is_returning = is_accumulated and not (
        candidate.has_resident_sums or (has_shards and layout.zero_stage == 1)
    )
    at_loss = (1.0 + (layout.pp > 1), float(is_returning and not has_shards))
    in_backward = (2.0, (2.0 - has_shards) * is_returning)
    in_deferring = (2.0, float(is_returning and not has_shards))
    beside_leaving = (2.0, in_backward[1] + 1.0)
    saved_in_head = saved
    if live.is_offloaded:  # all layers but the last one have left
        saved_in_head = live._replace(max_resident_layers=1.0).compute_saved_bytes(
            load.num_in_flight
        )
    moments = [_Moment(saved_in_head, logits, at_loss, has_root=load.has_head)]
    if candidate.engine.has_ordered_frees and load.has_head:
        saved -= live.head_bytes  # the last norm's input, freed before the layers' backward pass
        if gradients and not candidate.is_sharded and not facts.shape.tied_embeddings:
            remaining = 0.0  # the gradient of the head's weight is added to an existing one
    if quantising := compute_quantising_bytes(facts, candidate):
        moments.append(_Moment(saved, 0.0, at_loss, has_root=True, workspaces=quantising))
    if candidate.engine.has_ordered_frees and load.backward_moments:
        moments += [
            _Moment(
                live.compute_bytes_in_backward(load, moment),
                remaining,
                in_deferring if moment.is_deferring else in_backward,
                gradient_share=moment.gradient_share,
            )
            for moment in load.backward_moments
        ]
    else:
        moments += [
            _Moment(saved - freed + added, remaining, in_backward)
            for freed, added in live.backward_moments
        ]
    if persistent.moved.block_gradients and persistent.moved.num_blocks > 1:
        # The layer before the last one, whose gradients leave and whose saved tensors, casts of
        # weights included, are freed; of layers that differ, each kind that follows the last one.
        num_freed = layout.wrap_blocks if has_shards else 1
        freed_bytes = min(saved, num_freed * live.largest_layer_bytes)
        next_layer = (freed_bytes, live.recomputed_bytes + live.gradient_bytes)
        others = live.backward_moments[1:] or (next_layer,)
        casts = 0.0
        if any(has_saved_casts(candidate, kind) for kind in facts.kinds):
            casts = count_group_elements(facts, candidate, load) * candidate.activation_bytes
        moments += [
            _Moment(saved - freed - casts + added, remaining, beside_leaving)
            for freed, added in others
        ]
    is_norm_fused = candidate.has_fused_norms or candidate.has_fused_functions
    if load.has_head and facts.has_hidden_gradient and not is_norm_fused:
        # The last norm's gradient, before any layer has freed activations; the norm's output
        # and its gradient.
        stream = candidate.residual_tokens * facts.shape.hidden_size * candidate.activation_bytes
        is_unfused = facts.shape.norm != "layer"
        moments.append(
            _Moment(
                saved_in_head
                + stream
                + compute_norm_gradient_bytes(
                    stream, candidate.activation_bytes, is_fused=not is_unfused
                ),
                remaining,
                in_backward if has_shards else at_loss,  # FSDP2 gathers it with the last group
            )
        )
    num_reduced_elements = count_group_elements(facts, candidate, load, should_skip_frozen=True)
    is_last = has_last_reduction(candidate, persistent)
    reduction = compute_reduction_bytes(candidate, num_reduced_elements, is_accumulated=is_last)
    if reduction:
        share = 1.0
        if is_last:
            if load.num_stages == 1:  # no other micro-batch is in flight
                saved += live.compute_saved_bytes(1.0)
                saved -= live.compute_saved_bytes(load.num_in_flight)
            share = compute_partly_reduced_bytes(facts, candidate, load, persistent) / gradients
        # Offloaded layers return as others are freed.
        num_reduced = 0 if live.is_offloaded else min(layout.wrap_blocks, sum(load.layers))
        reduced = num_reduced * live.largest_layer_bytes
        other_layers = saved - reduced
        # While a group is reduced, the one before it leaves; whole gradients or sums stay.
        is_leaving = has_shards and (is_returning or not is_accumulated)
        in_reduced = beside_leaving if is_leaving else in_backward
        moments.append(_Moment(other_layers, remaining, in_reduced, workspaces=reduction))
        # During the next group's backward pass, which under recomputation allocates more than
        # the last one has freed.
        in_reduction = compute_pending_reduction_bytes(candidate, num_reduced_elements)
        moments += [
            _Moment(
                saved - max(freed, reduced) + added,
                remaining,
                in_reduced,
                workspaces=in_reduction,
                gradient_share=share,
            )
            for freed, added in live.backward_moments
            if not _has_one_backward_group(candidate, live)
        ]
    return _find_peak(facts, candidate, load, persistent, gradients, moments)


def _has_one_backward_group(candidate: Candidate, live: LiveActivations) -> bool:
    """Return True if no other group's gradients are reduced during the backward pass of a group,
    because the layers below it have none."""
    return live.num_frozen_layers > 0 and live.num_layers <= candidate.layout.wrap_blocks


def _find_peak(
    facts: ModelFacts,
    candidate: Candidate,
    load: StageLoad,
    persistent: PersistentMemory,
    gradients: float,
    moments: list[_Moment],
) -> MemoryParts:
    """Return memory at the moment with the most, given the gradients that exist at a share of 1."""
    moved = persistent.moved
    gathered = {
        has_root: compute_gathered_bytes(
            facts, candidate, load, persistent.parameters, should_include_root=has_root
        )
        for has_root in {moment.has_root for moment in moments}
    }

    def count_bytes(moment: _Moment) -> float:
        # Without the parts, of which a search would build a hundred thousand.
        return (
            moment.activations
            + moment.logits
            + moment.workspaces
            + gradients * moment.gradient_share
            + gathered[moment.has_root]
            + moved.compute_weight_bytes(moment.num_blocks[0])
            + moved.compute_gradient_bytes(moment.num_blocks[1])
        )

    peak = max(moments, key=count_bytes)
    return MemoryParts(
        weights=persistent.weights,
        optimizer=persistent.optimizer,
        gradients=gradients * peak.gradient_share
        + moved.compute_gradient_bytes(peak.num_blocks[1]),
        activations=peak.activations,
        logits=peak.logits,
        gathered=gathered[peak.has_root] + moved.compute_weight_bytes(peak.num_blocks[0]),
        workspaces=peak.workspaces,
    )


def _compute_backward_peak(
    facts: ModelFacts,
    candidate: Candidate,
    load: StageLoad,
    persistent: PersistentMemory,
    live: LiveActivations,
    num_layers: int,
    activation_bytes: float,
) -> MemoryParts:
    """Return memory at the end of the last steady-state backward pass: one pass less in flight.

    `num_layers` have not finished; beyond the first one, the offloaded activations of another one
    return.
    """
    layout = candidate.layout
    is_accumulated = candidate.gradient_accumulation_steps > 1
    num_returning = min(1, num_layers - 1)
    # The previous group is still being reduced during this layer's backward pass. Its own
    # gradients are allocated as its activations are freed.
    workspaces = 0.0
    if not _has_one_backward_group(candidate, live):
        workspaces = compute_pending_reduction_bytes(
            candidate, count_group_elements(facts, candidate, load, should_skip_frozen=True)
        )
    # The root's group is reduced when this layer has finished.
    freed = live.largest_layer_bytes
    if candidate.engine.has_ordered_frees:
        freed += live.recomputed_bytes + live.gradient_bytes
    workspaces = max(
        workspaces,
        compute_reduction_bytes(
            candidate, count_root_elements(facts, candidate, load, should_skip_frozen=True)
        )
        - freed,
    )
    if not candidate.engine.has_ordered_frees:
        workspaces += _compute_second_embedding_bytes(facts, candidate, load)
    gradients = persistent.gradients + persistent.reduced_gradients
    if has_last_reduction(candidate, persistent):
        # Of a rank's stages one is reduced at a time.
        num_groups = None if load.num_stages > 1 else -(-num_layers // layout.wrap_blocks)
        gradients = compute_partly_reduced_bytes(facts, candidate, load, persistent, num_groups)
    if candidate.adapter is None and load.has_embedding and not is_accumulated:
        num_pending = max(1, num_layers - live.num_frozen_layers)
        gradients -= compute_pending_gradient_bytes(
            facts, candidate, load, persistent, num_groups=-(-num_pending // layout.wrap_blocks)
        )
    # Of this layer and the last one.
    gradients += persistent.moved.compute_gradient_bytes(2.0, num_layers - 1)
    return MemoryParts(
        weights=persistent.weights,
        optimizer=persistent.optimizer,
        gradients=gradients,
        activations=activation_bytes,
        gathered=compute_gathered_bytes(
            facts,
            candidate,
            load,
            persistent.parameters,
            should_include_root=False,
            num_pending=num_layers if should_count_gathers(candidate) else None,
        )
        + persistent.moved.compute_weight_bytes(
            1.0 + max(num_returning, layout.pp > 1), num_layers - 1 - num_returning
        ),
        workspaces=workspaces,
    )


def _compute_second_embedding_bytes(
    facts: ModelFacts, candidate: Candidate, load: StageLoad
) -> float:
    """Compute the bytes of the embedding's gradient that is added to an existing one: it is
    allocated first."""
    if (
        candidate.is_sharded
        or candidate.adapter is not None
        or candidate.gradient_accumulation_steps == 1
        or not load.has_embedding
        or not facts.is_embedding_trained
    ):
        return 0.0
    return facts.count_elements(candidate.layout).embedding.local * candidate.master_bytes


def _list_embedding_peaks(
    facts: ModelFacts,
    candidate: Candidate,
    load: StageLoad,
    persistent: PersistentMemory,
    live: LiveActivations,
) -> list[MemoryParts]:
    """Return memory where the last layer of a pass is freed and the gradient of the embedding is
    added to an existing one, if it is. Next to it are that of the rows, converted, and the saved
    tensors of other passes."""
    workspaces = _compute_second_embedding_bytes(facts, candidate, load)
    if not workspaces or not candidate.engine.has_ordered_frees:
        return []
    rows = candidate.residual_tokens * facts.shape.hidden_size
    others = live.compute_saved_bytes(max(0.0, load.num_in_flight - 1.0))
    return [
        MemoryParts(
            weights=persistent.weights,
            optimizer=persistent.optimizer,
            gradients=persistent.gradients + persistent.reduced_gradients,
            activations=others + rows * max(candidate.master_bytes, candidate.activation_bytes),
            workspaces=workspaces,
        )
    ]
