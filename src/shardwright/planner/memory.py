"""Bytes on the rank with the most memory, by part, at the three possible peaks of a step.

    loss      all activations in flight are saved; the loss has its logits, and one group of
              parameters is gathered beyond what the backward pass needs
    backward  most activations are freed, gradients are complete, reduction buffers are in use,
              the embedding's gradient is computed
    update    no activations or gathered parameters; optimizer states, as at all times

Parts that persist between steps (weights, gradients, optimizer) follow the trainer's
`placement.place`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from shardwright.planner.activations import (
    compute_end_activation_bytes,
    compute_logit_bytes,
    compute_shared_table_bytes,
    count_micro_batch_tokens,
    count_residual_tokens,
    get_layer_activations,
)
from shardwright.planner.backward_peak import compute_norm_gradient_bytes
from shardwright.planner.candidate import OPTIMIZER_STATE_BYTES, Candidate
from shardwright.planner.efficiency import Efficiency
from shardwright.planner.model_costs import ModelFacts, ParameterElements
from shardwright.planner.prediction import MemoryParts


@dataclass(frozen=True)
class StageLoad:
    """Layers and activations of one pipeline rank: layers per kind (of all its stages),
    embedding, head, and micro-batches in flight.

    `num_in_flight` counts micro-batches whose activations are saved at once, in passes through all
    layers of the rank: a rank with two stages that saves three passes through one of them has
    1.5.
    """

    layers: tuple[int, ...]
    has_embedding: bool = True
    has_head: bool = True
    num_in_flight: float = 1.0
    num_stages: int = 1


class PersistentMemory(NamedTuple):
    """Bytes that persist between steps, and element counts for the peaks of a step."""

    weights: float
    gradients: float
    """Accumulated gradients of all micro-batches, unsharded or sharded according to the ZeRO
    stage."""
    reduced_gradients: float
    """Reduced gradient shard, beside the unsharded gradients that it is computed from."""
    micro_batch_gradients: float
    """Gradients of one micro-batch before they are accumulated."""
    updated_gradients: float
    """Gradients that the update reads."""
    optimizer: float
    parameters: ParameterElements
    trained_parameters: ParameterElements
    total_at_loss: float
    """Bytes at the loss without activations, but with gathered parameters: independent of
    micro-batch, recomputation and schedule."""


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
    live = _compute_live_activations(facts, candidate, load)
    moments = (
        _compute_loss_peak(facts, candidate, load, persistent, live),
        _compute_backward_peak(facts, candidate, load, persistent, live),
        MemoryParts(
            weights=persistent.weights,
            optimizer=persistent.optimizer,
            gradients=persistent.updated_gradients,
        ),
    )
    peak = max(moments, key=lambda parts: parts.total)
    driver = efficiency.context_bytes + efficiency.communicator_bytes * _count_process_groups(
        candidate
    )
    reserve = (
        efficiency.reserve_share * peak.total
        + efficiency.reserve_bytes
        + _compute_late_allocation_bytes(candidate, persistent, live, peak)
    )
    return replace(peak, reserve=reserve, driver=driver)


_REUSED_ACTIVATION_SHARE = 0.1
"""Share of the memory of freed activations that a micro-batch's gradients can reuse: blocks
have other sizes, and are partly in use."""


def _compute_late_allocation_bytes(
    candidate: Candidate, persistent: PersistentMemory, live: _LiveActivations, peak: MemoryParts
) -> float:
    """Compute bytes allocated after the peak because no freed block is large enough or belongs
    to that stream."""
    engine = candidate.conventions
    trained = persistent.trained_parameters
    sharded = candidate.layout.zero_stage >= 1 and candidate.layout.fsdp > 1
    late_shards = (
        max(0.0, persistent.gradients - peak.gradients)
        if engine.has_separate_gradient_stream and sharded
        else 0.0
    )
    fresh = (
        max(0.0, persistent.gradients + persistent.micro_batch_gradients - peak.gradients)
        if persistent.micro_batch_gradients
        else 0.0
    )
    if fresh:
        fresh *= fresh / (fresh + _REUSED_ACTIVATION_SHARE * live.bytes_per_pass)
    update_copies = engine.update_copy_bytes * (
        trained.sharded if candidate.layout.zero_stage else trained.local
    )
    # The freed logits leave blocks of the copies' size.
    return late_shards + fresh + max(0.0, update_copies - peak.logits)


def compute_updated_gradient_bytes(
    facts: ModelFacts, candidate: Candidate, load: StageLoad
) -> float:
    """Compute the bytes of gradients that the update reads."""
    return compute_persistent_memory(facts, candidate, load).updated_gradients


def compute_pass_activation_bytes(
    facts: ModelFacts, candidate: Candidate, load: StageLoad
) -> float:
    """Compute the activation bytes of one pass through a rank's layers."""
    return sum(
        count * get_layer_activations(facts, kind, candidate).saved_bytes
        for kind, count in zip(facts.kinds, load.layers, strict=True)
        if count
    )


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
    return sum(degree > 1 for degree in degrees)


def _sum_parameters(facts: ModelFacts, candidate: Candidate, load: StageLoad) -> ParameterElements:
    elements = facts.count_elements(candidate.layout)
    total = ParameterElements()
    for layer, count in zip(elements.layers, load.layers, strict=True):
        total = total.add(layer.multiply(count))
    if load.has_embedding or (load.has_head and facts.shape.tied_embeddings):
        total = total.add(elements.embedding)
    return total.add(elements.head) if load.has_head else total


def count_adapter_elements(
    facts: ModelFacts, candidate: Candidate, load: StageLoad
) -> ParameterElements:
    """Count the elements of a rank's low-rank matrices A [rank, in] and B [out, rank], sharded
    like their matrix."""
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
            shard = -(-adapter.rank // shards) * num_in + -(-num_out // shards) * adapter.rank
            num_matrices = (
                facts.shape.experts.num_experts / layout.ep
                if facts.shape.experts and product in kind.expert_matmuls
                else 1
            )
            total = total.add(
                ParameterElements(adapter.rank * (num_in + num_out), shard).multiply(
                    count * num_matrices
                )
            )
    return total


def compute_persistent_memory(
    facts: ModelFacts, candidate: Candidate, load: StageLoad
) -> PersistentMemory:
    """Compute the memory of a rank that persists between steps."""
    engine = candidate.conventions
    stage = candidate.layout.zero_stage
    layout = candidate.layout
    parameters = _sum_parameters(facts, candidate, load)
    master = candidate.master_bytes
    trained = (
        parameters if candidate.adapter is None else count_adapter_elements(facts, candidate, load)
    )
    weights = _compute_weight_bytes(facts, candidate, load, parameters, trained)
    if candidate.reference == "frozen":
        weights *= 2  # the reference is sharded like the model
    gradient_bytes = engine.gradient_bytes if engine.gradient_bytes is not None else float(master)
    whole_gradients = stage == 0 or (
        stage == 1 and (engine.has_unsharded_gradients or candidate.gradient_accumulation_steps > 1)
    )
    whole_gradients = whole_gradients or (
        stage == 2 and engine.should_defer_stage_2 and candidate.gradient_accumulation_steps > 1
    )
    gradients = (trained.local if whole_gradients else trained.sharded) * gradient_bytes
    has_separate_shard = whole_gradients and stage >= 1 and engine.weight_bytes is None
    reduced = trained.sharded * master if has_separate_shard else 0.0
    updated = reduced or gradients
    state = OPTIMIZER_STATE_BYTES[candidate.optimizer] * (2 if master == 8 else 1)
    if engine.has_half_precision_states and candidate.optimizer != "adamw_8bit":
        state /= 2
    optimizer = (state + engine.master_bytes) * trained.sharded
    if layout.zero_stage == 0:
        optimizer = (state + engine.master_bytes) * trained.local
    if candidate.offload == "optimizer":
        optimizer = 0.0
    elif candidate.offload == "parameters":
        weights = 0.0
        optimizer = 0.0
        gradients = 0.0
        reduced = 0.0
        updated = 0.0
    at_loss = weights + optimizer + _compute_gradient_bytes_at_loss(candidate, gradients)
    fresh = trained.local * engine.micro_batch_gradient_bytes
    standing = PersistentMemory(
        weights, gradients, reduced, fresh, updated, optimizer, parameters, trained, at_loss
    )
    if stage == 0 or layout.fsdp == 1:
        return standing  # cast copies count with the micro-batches in flight
    return standing._replace(
        total_at_loss=at_loss
        + _compute_gathered_bytes(facts, candidate, load, standing, should_include_root=False)
    )


def _compute_weight_bytes(
    facts: ModelFacts,
    candidate: Candidate,
    load: StageLoad,
    parameters: ParameterElements,
    trained_parameters: ParameterElements,
) -> float:
    engine = candidate.conventions
    layout = candidate.layout
    if candidate.adapter is not None:
        # Frozen weights are in the compute precision. shardwright's are FSDP2's from stage 1
        # on, as all parameters are.
        elements = (
            parameters.sharded
            if layout.zero_stage >= (1 if engine.weight_bytes is None else 3)
            else parameters.local
        )
        size = float(candidate.activation_bytes)
        frozen = elements * size
        if candidate.conventions.should_load_unsharded and layout.zero_stage == 3:
            frozen += parameters.local * size
        if candidate.adapter.quantised:
            by_part = facts.count_elements(layout)
            matrices = sum(
                layer.local_matrices * count
                for layer, count in zip(by_part.layers, load.layers, strict=True)
            )
            for kind, count in zip(facts.kinds, load.layers, strict=True):
                unquantised = [
                    product
                    for product in kind.matmuls
                    if product.role in candidate.adapter.unquantised
                ]
                matrices -= (
                    count
                    * sum(product.num_inputs * product.num_outputs for product in unquantised)
                    / layout.tp
                )
            matrices *= elements / parameters.local if parameters.local else 0.0  # 0 without layers
            unquantised_bytes = (
                size if engine.unquantised_bytes is None else engine.unquantised_bytes
            )
            frozen = (elements - matrices) * unquantised_bytes + matrices * engine.nf4_bytes
        return (
            frozen
            + (trained_parameters.sharded if layout.zero_stage >= 1 else trained_parameters.local)
            * candidate.master_bytes
        )
    if engine.weight_bytes is None:
        return (
            parameters.sharded if layout.zero_stage >= 1 else parameters.local
        ) * candidate.master_bytes
    return (
        parameters.sharded if layout.zero_stage == 3 else parameters.local
    ) * engine.weight_bytes


def _get_gather_bytes(candidate: Candidate) -> float:
    gather_bytes = candidate.conventions.gather_bytes
    return float(candidate.activation_bytes) if gather_bytes is None else gather_bytes


def _get_reduce_bytes(candidate: Candidate) -> float:
    reduce_bytes = candidate.conventions.reduce_bytes
    return (
        (2.0 if candidate.should_reduce_in_bf16 else float(candidate.master_bytes))
        if reduce_bytes is None
        else reduce_bytes
    )


def _count_group_elements(facts: ModelFacts, candidate: Candidate, load: StageLoad) -> float:
    """Count the elements of the largest group of blocks that is gathered together."""
    by_part = facts.count_elements(candidate.layout)
    present = [
        layer.local for layer, count in zip(by_part.layers, load.layers, strict=True) if count
    ]
    return max(present, default=0.0) * min(candidate.layout.wrap_blocks, sum(load.layers))


def _count_root_elements(facts: ModelFacts, candidate: Candidate, load: StageLoad) -> float:
    """Count the elements gathered with the root module: embedding and head of the stage."""
    by_part = facts.count_elements(candidate.layout)
    elements = (
        by_part.embedding.local
        if load.has_embedding or (load.has_head and facts.shape.tied_embeddings)
        else 0.0
    )
    return elements + (by_part.head.local if load.has_head else 0.0)


def _compute_gathered_bytes(
    facts: ModelFacts,
    candidate: Candidate,
    load: StageLoad,
    persistent: PersistentMemory,
    *,
    should_include_root: bool,
) -> float:
    """Compute the bytes of gathered or cast parameters in the compute precision."""
    layout = candidate.layout
    size = _get_gather_bytes(candidate)
    if candidate.adapter is not None and candidate.adapter.quantised and layout.zero_stage < 3:
        # A quantised matrix is dequantised for its matmul, one at a time.
        return (
            max(
                (p.num_inputs * p.num_outputs / layout.tp for k in facts.kinds for p in k.matmuls),
                default=0.0,
            )
            * size
        )
    sharded = layout.zero_stage >= 1 and layout.fsdp > 1
    if layout.zero_stage == 3 and sharded:
        num_prefetched = min(layout.prefetch_depth, layout.max_gathers_in_flight - 1)
        groups = min(1 + num_prefetched, -(-sum(load.layers) // layout.wrap_blocks) or 1)
        return groups * _count_group_elements(facts, candidate, load) * size + (
            _count_root_elements(facts, candidate, load) * size if should_include_root else 0
        )
    if candidate.conventions.weight_bytes is not None:
        return 0.0
    if sharded:
        return persistent.parameters.local * size
    if (
        not candidate.conventions.should_cast_at_use
        or size == candidate.master_bytes
        or candidate.adapter is not None
    ):
        return 0.0
    # Casts are saved for the backward pass with the activations of their layer, once per
    # micro-batch in flight. Under recomputation, which repeats them, only those of one layer
    # exist.
    if candidate.recompute == "full" or (
        candidate.recompute == "selective" and candidate.conventions.should_track_backward_frees
    ):
        return _count_group_elements(facts, candidate, load) * size + (
            _count_root_elements(facts, candidate, load) * size if should_include_root else 0
        )
    layers = persistent.parameters.local_matrices - _count_root_elements(facts, candidate, load)
    return max(0.0, layers) * size * load.num_in_flight + (
        _count_root_elements(facts, candidate, load) * size if should_include_root else 0
    )


class _LiveActivations(NamedTuple):
    """Bytes of activations: of one pass through the rank's layers, of tables shared by all
    layers, and of pipeline messages. Of the largest layer: saved, recomputed and gradients."""

    bytes_per_pass: float
    table_bytes: float
    message_bytes: float
    largest_layer_bytes: float
    recomputed_bytes: float
    gradient_bytes: float

    def compute_saved_bytes(self, in_flight: float) -> float:
        """Compute the saved bytes of `num_in_flight` passes."""
        return (
            in_flight * self.bytes_per_pass
            + self.table_bytes * max(1.0, in_flight)
            + self.message_bytes
        )


def _compute_live_activations(
    facts: ModelFacts, candidate: Candidate, load: StageLoad
) -> _LiveActivations:
    saved = largest = recomputed = gradients = 0.0
    for kind, count in zip(facts.kinds, load.layers, strict=True):
        if count:
            layer = get_layer_activations(facts, kind, candidate)
            share = (
                1.0
                if candidate.num_fp4_layers is None
                else min(1.0, candidate.num_fp4_layers / facts.shape.num_layers)
            )
            bf16_layer = (
                layer
                if share == 1.0
                else get_layer_activations(
                    facts, kind, replace(candidate, precision="bf16", num_fp4_layers=None)
                )
            )
            saved += (share * layer.saved_bytes + (1.0 - share) * bf16_layer.saved_bytes) * count
            largest = max(largest, layer.saved_bytes)
            if not candidate.conventions.should_track_backward_frees:
                recomputed = max(recomputed, layer.recomputed_bytes)
                gradients = max(gradients, layer.gradient_bytes)
            elif layer.recomputed_bytes + layer.gradient_bytes > recomputed + gradients:
                recomputed = layer.recomputed_bytes
                gradients = layer.gradient_bytes
    embedding_bytes, head_bytes = compute_end_activation_bytes(facts, candidate)
    ends = (embedding_bytes if load.has_embedding else 0.0) + (head_bytes if load.has_head else 0.0)
    messages = 0.0
    if candidate.layout.pp > 1:
        # A stage's output is saved until its gradient arrives. A receive is posted before it is
        # needed.
        message = (
            count_residual_tokens(candidate) * facts.shape.hidden_size * candidate.activation_bytes
        )
        ends += (load.num_stages - load.has_head) * message
        messages = load.num_stages * message
    if candidate.layout.tp > 1 and candidate.layout.sequence_parallel:
        gathered = (
            count_micro_batch_tokens(candidate)
            * facts.shape.hidden_size
            * candidate.activation_bytes
        )
        messages += (
            candidate.conventions.num_sequence_buffers
            + candidate.conventions.num_unreleased_sequences
        ) * gathered
    return _LiveActivations(
        saved + ends,
        compute_shared_table_bytes(facts, candidate),
        messages,
        largest,
        recomputed,
        gradients,
    )


def _compute_loss_peak(
    facts: ModelFacts,
    candidate: Candidate,
    load: StageLoad,
    persistent: PersistentMemory,
    live: _LiveActivations,
) -> MemoryParts:
    """Return the largest of: the loss with its logits, the first layer of the backward pass,
    and the first reduction after it."""
    layout = candidate.layout
    saved = live.compute_saved_bytes(load.num_in_flight)
    logits, remaining = compute_logit_bytes(facts, candidate) if load.has_head else (0.0, 0.0)
    gradients = _compute_gradient_bytes_at_loss(candidate, persistent.gradients)
    moments = [
        (saved, logits, load.has_head, 0.0),
        (saved + live.recomputed_bytes + live.gradient_bytes, remaining, False, 0.0),
    ]
    if load.has_head and not candidate.has_fused_norms:
        # The last norm's gradient, before any layer has freed activations; the norm's output
        # and its gradient.
        stream = (
            count_residual_tokens(candidate) * facts.shape.hidden_size * candidate.activation_bytes
        )
        is_unfused = facts.shape.norm != "layer"
        moments.append(
            (
                saved
                + stream
                + compute_norm_gradient_bytes(
                    stream, candidate.activation_bytes, is_fused=not is_unfused
                ),
                remaining,
                False,
                0.0,
            )
        )
    reduction = _compute_reduction_bytes(candidate, _count_group_elements(facts, candidate, load))
    if reduction:
        num_reduced = min(layout.wrap_blocks, sum(load.layers))
        other_layers = saved - num_reduced * live.largest_layer_bytes
        moments.append((other_layers, remaining, False, reduction))
        # Beside the next group's backward pass, which under recomputation allocates more than
        # the last one has freed.
        in_reduction = _compute_pending_reduction_bytes(
            candidate, _count_group_elements(facts, candidate, load)
        )
        moments.append(
            (
                other_layers + live.recomputed_bytes + live.gradient_bytes,
                remaining,
                False,
                in_reduction,
            )
        )
    peaks = [
        MemoryParts(
            weights=persistent.weights,
            optimizer=persistent.optimizer,
            gradients=gradients,
            activations=activations,
            logits=at_head,
            gathered=_compute_gathered_bytes(
                facts, candidate, load, persistent, should_include_root=root
            ),
            workspaces=workspaces,
        )
        for activations, at_head, root, workspaces in moments
    ]
    return max(peaks, key=lambda parts: parts.total)


def _compute_gradient_bytes_at_loss(candidate: Candidate, gradients: float) -> float:
    """Compute gradient bytes of earlier micro-batches, and of buffers that persist for the
    whole run."""
    is_accumulated = candidate.gradient_accumulation_steps > 1
    has_buckets = _has_buckets(candidate)
    if is_accumulated and has_buckets and candidate.conventions.weight_bytes is None:
        return 2.0 * gradients  # DDP accumulates earlier micro-batches outside its buckets
    return (
        gradients
        if is_accumulated or has_buckets or candidate.conventions.has_unsharded_gradients
        else 0.0
    )


def _has_buckets(candidate: Candidate) -> bool:
    """Return True if gradients are views of persistent buckets (DDP)."""
    return candidate.layout.zero_stage == 0 and candidate.layout.dp_replicate > 1


def _compute_reduction_bytes(candidate: Candidate, num_elements: float) -> float:
    """Compute bytes of a group's gradients in reduction: in the compute precision, and a copy
    in the reduction's precision."""
    layout = candidate.layout
    if candidate.adapter is not None:
        return 0.0
    if layout.zero_stage >= 1 and layout.fsdp > 1:
        return num_elements * (_get_gather_bytes(candidate) + _get_reduce_bytes(candidate))
    if _has_buckets(candidate):
        return 2.0 * layout.bucket_size_bytes if candidate.should_reduce_in_bf16 else 0.0
    return 0.0


def _compute_pending_reduction_bytes(candidate: Candidate, num_elements: float) -> float:
    """Compute bytes of a group's gradients during the reduction, after their original is
    freed."""
    sharded = (
        candidate.layout.zero_stage >= 1 and candidate.layout.fsdp > 1 and candidate.adapter is None
    )
    return (
        num_elements * _get_reduce_bytes(candidate)
        if sharded
        else _compute_reduction_bytes(candidate, num_elements)
    )


def _compute_backward_peak(
    facts: ModelFacts,
    candidate: Candidate,
    load: StageLoad,
    persistent: PersistentMemory,
    live: _LiveActivations,
) -> MemoryParts:
    """Return memory at the end of the last steady-state backward pass: one pass less in flight,
    the embedding's gradient in progress."""
    saved = live.compute_saved_bytes(max(0.0, load.num_in_flight - 1.0))
    sharded = candidate.layout.zero_stage >= 1 and candidate.layout.fsdp > 1
    # The previous group is still being reduced during this layer's backward pass. Its own
    # gradients are allocated as its activations are freed.
    workspaces = _compute_pending_reduction_bytes(
        candidate, _count_group_elements(facts, candidate, load)
    )
    workspaces = max(
        workspaces,
        _compute_reduction_bytes(candidate, _count_root_elements(facts, candidate, load))
        - live.largest_layer_bytes,
    )
    if (
        not sharded
        and candidate.adapter is None
        and candidate.gradient_accumulation_steps > 1
        and load.has_embedding
    ):
        # A gradient that is added to an existing one is allocated first.
        workspaces += (
            facts.count_elements(candidate.layout).embedding.local * candidate.master_bytes
        )
    gradients = (
        persistent.gradients + persistent.reduced_gradients + persistent.micro_batch_gradients
    )
    if (
        candidate.conventions.should_track_backward_frees
        and candidate.adapter is None
        and load.has_embedding
    ):
        gradients -= _compute_pending_gradient_bytes(facts, candidate, load, persistent)
    return MemoryParts(
        weights=persistent.weights,
        optimizer=persistent.optimizer,
        gradients=gradients,
        activations=saved + live.recomputed_bytes + live.gradient_bytes + live.largest_layer_bytes,
        gathered=_compute_gathered_bytes(
            facts, candidate, load, persistent, should_include_root=False
        ),
        workspaces=workspaces,
    )


def _compute_pending_gradient_bytes(
    facts: ModelFacts, candidate: Candidate, load: StageLoad, persistent: PersistentMemory
) -> float:
    """Compute gradient bytes not yet allocated at the peak of the first layer's backward pass:
    its own and the embedding's.

    Zero if gradients of earlier micro-batches or buckets exist already.
    """
    if (
        _compute_gradient_bytes_at_loss(candidate, persistent.gradients)
        or not persistent.trained_parameters.local
    ):
        return 0.0
    by_part = facts.count_elements(candidate.layout)
    pending = _count_group_elements(facts, candidate, load)
    pending += 0.0 if facts.shape.tied_embeddings else by_part.embedding.local
    return persistent.gradients * min(1.0, pending / persistent.trained_parameters.local)
