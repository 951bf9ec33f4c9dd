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
    head_logits,
    layer_activations,
    micro_batch_tokens,
    residual_tokens,
    shared_tables,
    stage_ends,
)
from shardwright.planner.backward import norm_gradient
from shardwright.planner.candidate import STATE_BYTES, Candidate
from shardwright.planner.efficiency import Efficiency
from shardwright.planner.facts import Held, ModelFacts
from shardwright.planner.prediction import MemoryParts


@dataclass(frozen=True)
class StageLoad:
    """Layers and activations of one pipeline rank: layers per kind (of all its stages),
    embedding, head, and micro-batches in flight.

    `in_flight` counts micro-batches whose activations are saved at once, in passes through all
    layers of the rank: a rank with two stages that saves three passes through one of them has
    1.5.
    """

    layers: tuple[int, ...]
    embedding: bool = True
    head: bool = True
    in_flight: float = 1.0
    num_stages: int = 1


class Standing(NamedTuple):
    """Bytes that persist between steps, and element counts for the peaks of a step."""

    weights: float
    gradients: float
    """Accumulated gradients of all micro-batches, unsharded or sharded according to the ZeRO
    stage."""
    reduced: float
    """Reduced gradient shard, beside the unsharded gradients that it is computed from."""
    fresh: float
    """Gradients of one micro-batch before they are accumulated."""
    updated: float
    """Gradients that the update reads."""
    optimizer: float
    held: Held
    trained: Held
    at_loss: float
    """Bytes at the loss without activations, but with gathered parameters: independent of
    micro-batch, recomputation and schedule."""


def predict_memory(
    facts: ModelFacts, candidate: Candidate, load: StageLoad, efficiency: Efficiency, standing: Standing | None = None
) -> MemoryParts:
    """Compute the bytes of one rank, by part, at its peak. Pass `standing` if it is already
    known."""
    standing = standing or standing_of(facts, candidate, load)
    live = _activations(facts, candidate, load)
    moments = (
        _at_loss(facts, candidate, load, standing, live),
        _at_backward(facts, candidate, load, standing, live),
        MemoryParts(weights=standing.weights, optimizer=standing.optimizer, gradients=standing.updated),
    )
    peak = max(moments, key=lambda parts: parts.total)
    driver = efficiency.context_bytes + efficiency.communicator_bytes * _num_groups(candidate)
    reserve = efficiency.reserve_share * peak.total + efficiency.reserve_bytes + _apart(candidate, standing, live, peak)
    return replace(peak, reserve=reserve, driver=driver)


_REUSED = 0.1
"""Share of the memory of freed activations that a micro-batch's gradients can reuse: blocks
have other sizes, and are partly in use."""


def _apart(candidate: Candidate, standing: Standing, live: _Live, peak: MemoryParts) -> float:
    """Compute bytes allocated after the peak because no freed block is large enough or belongs
    to that stream."""
    engine = candidate.engine
    trained = standing.trained
    sharded = candidate.layout.zero_stage >= 1 and candidate.layout.fsdp > 1
    late_shards = max(0.0, standing.gradients - peak.gradients) if engine.gradients_apart and sharded else 0.0
    fresh = max(0.0, standing.gradients + standing.fresh - peak.gradients) if standing.fresh else 0.0
    if fresh:
        fresh *= fresh / (fresh + _REUSED * live.per_pass)
    update_copies = engine.update_bytes * (trained.shard if candidate.layout.zero_stage else trained.whole)
    # The freed logits leave blocks of the copies' size.
    return late_shards + fresh + max(0.0, update_copies - peak.logits)


def updated_gradients(facts: ModelFacts, candidate: Candidate, load: StageLoad) -> float:
    """Compute the bytes of gradients that the update reads."""
    return standing_of(facts, candidate, load).updated


def least_activations(facts: ModelFacts, candidate: Candidate, load: StageLoad) -> float:
    """Compute the activation bytes of one pass through a rank's layers."""
    return sum(
        count * layer_activations(facts, kind, candidate).kept
        for kind, count in zip(facts.kinds, load.layers, strict=True)
        if count
    )


def _num_groups(candidate: Candidate) -> int:
    layout = candidate.layout
    degrees = (layout.pp, layout.dp_replicate, layout.fsdp if layout.zero_stage else 1, layout.cp, layout.tp, layout.ep)
    return sum(degree > 1 for degree in degrees)


def _sum(facts: ModelFacts, candidate: Candidate, load: StageLoad) -> Held:
    elements = facts.held(candidate.layout)
    total = Held()
    for layer, count in zip(elements.layers, load.layers, strict=True):
        total = total.plus(layer.times(count))
    if load.embedding or (load.head and facts.shape.tied_embeddings):
        total = total.plus(elements.embedding)
    return total.plus(elements.head) if load.head else total


def adapter_elements(facts: ModelFacts, candidate: Candidate, load: StageLoad) -> Held:
    """Count the elements of a rank's low-rank matrices A [rank, in] and B [out, rank], sharded
    like their matrix."""
    adapter = candidate.adapter
    layout = candidate.layout
    assert adapter is not None
    total = Held()
    for kind, count in zip(facts.kinds, load.layers, strict=True):
        for product in (*kind.products, *kind.expert_products):
            if product.role not in adapter.roles:
                continue
            num_in = product.num_in / (layout.tp if product.cut == "rows" else 1)
            num_out = product.num_out / (layout.tp if product.cut == "columns" else 1)
            shards = layout.fsdp if layout.zero_stage >= 1 else 1
            shard = -(-adapter.rank // shards) * num_in + -(-num_out // shards) * adapter.rank
            num_matrices = (
                facts.shape.experts.num_experts / layout.ep if facts.shape.experts and product in kind.expert_products else 1
            )
            total = total.plus(Held(adapter.rank * (num_in + num_out), shard).times(count * num_matrices))
    return total


def standing_of(facts: ModelFacts, candidate: Candidate, load: StageLoad) -> Standing:
    """Compute the memory of a rank that persists between steps."""
    engine = candidate.engine
    stage = candidate.layout.zero_stage
    layout = candidate.layout
    parameters = _sum(facts, candidate, load)
    master = candidate.master_bytes
    trained = parameters if candidate.adapter is None else adapter_elements(facts, candidate, load)
    weights = _weights(facts, candidate, load, parameters, trained)
    if candidate.reference == "frozen":
        weights *= 2  # the reference is sharded like the model
    gradient_bytes = engine.gradient_bytes if engine.gradient_bytes is not None else float(master)
    whole_gradients = stage == 0 or (stage == 1 and (engine.whole_gradients or candidate.gradient_accumulation_steps > 1))
    whole_gradients = whole_gradients or (stage == 2 and engine.defers_stage_2 and candidate.gradient_accumulation_steps > 1)
    gradients = (trained.whole if whole_gradients else trained.shard) * gradient_bytes
    has_separate_shard = whole_gradients and stage >= 1 and engine.weight_bytes is None
    reduced = trained.shard * master if has_separate_shard else 0.0
    updated = reduced or gradients
    state = STATE_BYTES[candidate.optimizer] * (2 if master == 8 else 1)
    if engine.half_states and candidate.optimizer != "adamw_8bit":
        state /= 2
    optimizer = (state + engine.master_bytes) * trained.shard
    if layout.zero_stage == 0:
        optimizer = (state + engine.master_bytes) * trained.whole
    if candidate.offload == "optimizer":
        optimizer = 0.0
    elif candidate.offload == "parameters":
        weights = 0.0
        optimizer = 0.0
        gradients = 0.0
        reduced = 0.0
        updated = 0.0
    at_loss = weights + optimizer + _gradients_at_loss(candidate, gradients)
    fresh = trained.whole * engine.fresh_gradient_bytes
    standing = Standing(weights, gradients, reduced, fresh, updated, optimizer, parameters, trained, at_loss)
    if stage == 0 or layout.fsdp == 1:
        return standing  # cast copies count with the micro-batches in flight
    return standing._replace(at_loss=at_loss + _gathered(facts, candidate, load, standing, root=False))


def _weights(facts: ModelFacts, candidate: Candidate, load: StageLoad, held: Held, trained: Held) -> float:
    engine = candidate.engine
    layout = candidate.layout
    if candidate.adapter is not None:
        # Frozen weights are in the compute precision. shardwright's are FSDP2's from stage 1
        # on, as all parameters are.
        elements = held.shard if layout.zero_stage >= (1 if engine.weight_bytes is None else 3) else held.whole
        size = float(candidate.activation_bytes)
        frozen = elements * size
        if candidate.engine.loads_whole and layout.zero_stage == 3:
            frozen += held.whole * size
        if candidate.adapter.quantised:
            by_part = facts.held(layout)
            matrices = sum(layer.matrices * count for layer, count in zip(by_part.layers, load.layers, strict=True))
            for kind, count in zip(facts.kinds, load.layers, strict=True):
                unquantised = [product for product in kind.products if product.role in candidate.adapter.unquantised]
                matrices -= count * sum(product.num_in * product.num_out for product in unquantised) / layout.tp
            matrices *= elements / held.whole if held.whole else 0.0  # 0 without layers
            unquantised_bytes = size if engine.unquantised_bytes is None else engine.unquantised_bytes
            frozen = (elements - matrices) * unquantised_bytes + matrices * engine.nf4_bytes
        return frozen + (trained.shard if layout.zero_stage >= 1 else trained.whole) * candidate.master_bytes
    if engine.weight_bytes is None:
        return (held.shard if layout.zero_stage >= 1 else held.whole) * candidate.master_bytes
    return (held.shard if layout.zero_stage == 3 else held.whole) * engine.weight_bytes


def _gather_size(candidate: Candidate) -> float:
    gather_bytes = candidate.engine.gather_bytes
    return float(candidate.activation_bytes) if gather_bytes is None else gather_bytes


def _reduce_size(candidate: Candidate) -> float:
    reduce_bytes = candidate.engine.reduce_bytes
    return (2.0 if candidate.reduce_in_bf16 else float(candidate.master_bytes)) if reduce_bytes is None else reduce_bytes


def _group_elements(facts: ModelFacts, candidate: Candidate, load: StageLoad) -> float:
    """Count the elements of the largest group of blocks that is gathered together."""
    by_part = facts.held(candidate.layout)
    present = [layer.whole for layer, count in zip(by_part.layers, load.layers, strict=True) if count]
    return max(present, default=0.0) * min(candidate.layout.wrap_blocks, sum(load.layers))


def _root_elements(facts: ModelFacts, candidate: Candidate, load: StageLoad) -> float:
    """Count the elements gathered with the root module: embedding and head of the stage."""
    by_part = facts.held(candidate.layout)
    elements = by_part.embedding.whole if load.embedding or (load.head and facts.shape.tied_embeddings) else 0.0
    return elements + (by_part.head.whole if load.head else 0.0)


def _gathered(facts: ModelFacts, candidate: Candidate, load: StageLoad, standing: Standing, *, root: bool) -> float:
    """Compute the bytes of gathered or cast parameters in the compute precision."""
    layout = candidate.layout
    size = _gather_size(candidate)
    if candidate.adapter is not None and candidate.adapter.quantised and layout.zero_stage < 3:
        # A quantised matrix is dequantised for its matmul, one at a time.
        return max((p.num_in * p.num_out / layout.tp for k in facts.kinds for p in k.products), default=0.0) * size
    sharded = layout.zero_stage >= 1 and layout.fsdp > 1
    if layout.zero_stage == 3 and sharded:
        num_prefetched = min(layout.prefetch_depth, layout.max_gathers_in_flight - 1)
        groups = min(1 + num_prefetched, -(-sum(load.layers) // layout.wrap_blocks) or 1)
        return groups * _group_elements(facts, candidate, load) * size + (
            _root_elements(facts, candidate, load) * size if root else 0
        )
    if candidate.engine.weight_bytes is not None:
        return 0.0
    if sharded:
        return standing.held.whole * size
    if not candidate.engine.casts_at_use or size == candidate.master_bytes or candidate.adapter is not None:
        return 0.0
    # Casts are saved for the backward pass with the activations of their layer, once per
    # micro-batch in flight. Under recomputation, which repeats them, only those of one layer
    # exist.
    if candidate.recompute == "full" or (candidate.recompute == "selective" and candidate.engine.frees_in_backward):
        return _group_elements(facts, candidate, load) * size + (_root_elements(facts, candidate, load) * size if root else 0)
    layers = standing.held.matrices - _root_elements(facts, candidate, load)
    return max(0.0, layers) * size * load.in_flight + (_root_elements(facts, candidate, load) * size if root else 0)


class _Live(NamedTuple):
    """Bytes of activations: of one pass through the rank's layers, of tables shared by all
    layers, and of pipeline messages. Of the largest layer: saved, recomputed and gradients."""

    per_pass: float
    tables: float
    messages: float
    largest: float
    rebuilt: float
    gradients: float

    def kept(self, in_flight: float) -> float:
        """Compute the saved bytes of `in_flight` passes."""
        return in_flight * self.per_pass + self.tables * max(1.0, in_flight) + self.messages


def _activations(facts: ModelFacts, candidate: Candidate, load: StageLoad) -> _Live:
    saved = largest = recomputed = gradients = 0.0
    for kind, count in zip(facts.kinds, load.layers, strict=True):
        if count:
            layer = layer_activations(facts, kind, candidate)
            share = 1.0 if candidate.fp4_layers is None else min(1.0, candidate.fp4_layers / facts.shape.num_layers)
            bf16_layer = (
                layer if share == 1.0 else layer_activations(facts, kind, replace(candidate, precision="bf16", fp4_layers=None))
            )
            saved += (share * layer.kept + (1.0 - share) * bf16_layer.kept) * count
            largest = max(largest, layer.kept)
            if not candidate.engine.frees_in_backward:
                recomputed = max(recomputed, layer.rebuilt)
                gradients = max(gradients, layer.gradients)
            elif layer.rebuilt + layer.gradients > recomputed + gradients:
                recomputed = layer.rebuilt
                gradients = layer.gradients
    embedding_bytes, head_bytes = stage_ends(facts, candidate)
    ends = (embedding_bytes if load.embedding else 0.0) + (head_bytes if load.head else 0.0)
    messages = 0.0
    if candidate.layout.pp > 1:
        # A stage's output is saved until its gradient arrives. A receive is posted before it is
        # needed.
        message = residual_tokens(candidate) * facts.shape.hidden_size * candidate.activation_bytes
        ends += (load.num_stages - load.head) * message
        messages = load.num_stages * message
    if candidate.layout.tp > 1 and candidate.layout.sequence_parallel:
        gathered = micro_batch_tokens(candidate) * facts.shape.hidden_size * candidate.activation_bytes
        messages += (candidate.engine.sequence_buffers + candidate.engine.waiting_sequences) * gathered
    return _Live(saved + ends, shared_tables(facts, candidate), messages, largest, recomputed, gradients)


def _at_loss(facts: ModelFacts, candidate: Candidate, load: StageLoad, standing: Standing, live: _Live) -> MemoryParts:
    """Return the largest of: the loss with its logits, the first layer of the backward pass,
    and the first reduction after it."""
    layout = candidate.layout
    saved = live.kept(load.in_flight)
    logits, remaining = head_logits(facts, candidate) if load.head else (0.0, 0.0)
    gradients = _gradients_at_loss(candidate, standing.gradients)
    moments = [(saved, logits, load.head, 0.0), (saved + live.rebuilt + live.gradients, remaining, False, 0.0)]
    if load.head and not candidate.fused_norms:
        # The last norm's gradient, before any layer has freed activations; the norm's output
        # and its gradient.
        stream = residual_tokens(candidate) * facts.shape.hidden_size * candidate.activation_bytes
        is_unfused = facts.shape.norm != "layer"
        moments.append(
            (saved + stream + norm_gradient(stream, candidate.activation_bytes, fused=not is_unfused), remaining, False, 0.0)
        )
    reduction = _reduction(candidate, _group_elements(facts, candidate, load))
    if reduction:
        num_reduced = min(layout.wrap_blocks, sum(load.layers))
        other_layers = saved - num_reduced * live.largest
        moments.append((other_layers, remaining, False, reduction))
        # Beside the next group's backward pass, which under recomputation allocates more than
        # the last one has freed.
        in_reduction = _in_flight(candidate, _group_elements(facts, candidate, load))
        moments.append((other_layers + live.rebuilt + live.gradients, remaining, False, in_reduction))
    peaks = [
        MemoryParts(
            weights=standing.weights,
            optimizer=standing.optimizer,
            gradients=gradients,
            activations=activations,
            logits=at_head,
            gathered=_gathered(facts, candidate, load, standing, root=root),
            workspaces=workspaces,
        )
        for activations, at_head, root, workspaces in moments
    ]
    return max(peaks, key=lambda parts: parts.total)


def _gradients_at_loss(candidate: Candidate, gradients: float) -> float:
    """Compute gradient bytes of earlier micro-batches, and of buffers that persist for the
    whole run."""
    is_accumulated = candidate.gradient_accumulation_steps > 1
    has_buckets = _has_buckets(candidate)
    if is_accumulated and has_buckets and candidate.engine.weight_bytes is None:
        return 2.0 * gradients  # DDP accumulates earlier micro-batches outside its buckets
    return gradients if is_accumulated or has_buckets or candidate.engine.whole_gradients else 0.0


def _has_buckets(candidate: Candidate) -> bool:
    """Return True if gradients are views of persistent buckets (DDP)."""
    return candidate.layout.zero_stage == 0 and candidate.layout.dp_replicate > 1


def _reduction(candidate: Candidate, elements: float) -> float:
    """Compute bytes of a group's gradients in reduction: in the compute precision, and a copy
    in the reduction's precision."""
    layout = candidate.layout
    if candidate.adapter is not None:
        return 0.0
    if layout.zero_stage >= 1 and layout.fsdp > 1:
        return elements * (_gather_size(candidate) + _reduce_size(candidate))
    if _has_buckets(candidate):
        return 2.0 * layout.bucket_size_bytes if candidate.reduce_in_bf16 else 0.0
    return 0.0


def _in_flight(candidate: Candidate, elements: float) -> float:
    """Compute bytes of a group's gradients during the reduction, after their original is
    freed."""
    sharded = candidate.layout.zero_stage >= 1 and candidate.layout.fsdp > 1 and candidate.adapter is None
    return elements * _reduce_size(candidate) if sharded else _reduction(candidate, elements)


def _at_backward(facts: ModelFacts, candidate: Candidate, load: StageLoad, standing: Standing, live: _Live) -> MemoryParts:
    """Return memory at the end of the last steady-state backward pass: one pass less in flight,
    the embedding's gradient in progress."""
    saved = live.kept(max(0.0, load.in_flight - 1.0))
    sharded = candidate.layout.zero_stage >= 1 and candidate.layout.fsdp > 1
    # The previous group is still being reduced during this layer's backward pass. Its own
    # gradients are allocated as its activations are freed.
    workspaces = _in_flight(candidate, _group_elements(facts, candidate, load))
    workspaces = max(workspaces, _reduction(candidate, _root_elements(facts, candidate, load)) - live.largest)
    if not sharded and candidate.adapter is None and candidate.gradient_accumulation_steps > 1 and load.embedding:
        # A gradient that is added to an existing one is allocated first.
        workspaces += facts.held(candidate.layout).embedding.whole * candidate.master_bytes
    gradients = standing.gradients + standing.reduced + standing.fresh
    if candidate.engine.frees_in_backward and candidate.adapter is None and load.embedding:
        gradients -= _yet_to_come(facts, candidate, load, standing)
    return MemoryParts(
        weights=standing.weights,
        optimizer=standing.optimizer,
        gradients=gradients,
        activations=saved + live.rebuilt + live.gradients + live.largest,
        gathered=_gathered(facts, candidate, load, standing, root=False),
        workspaces=workspaces,
    )


def _yet_to_come(facts: ModelFacts, candidate: Candidate, load: StageLoad, standing: Standing) -> float:
    """Compute gradient bytes not yet allocated at the peak of the first layer's backward pass:
    its own and the embedding's.

    Zero if gradients of earlier micro-batches or buckets exist already.
    """
    if _gradients_at_loss(candidate, standing.gradients) or not standing.trained.whole:
        return 0.0
    by_part = facts.held(candidate.layout)
    pending = _group_elements(facts, candidate, load)
    pending += 0.0 if facts.shape.tied_embeddings else by_part.embedding.whole
    return standing.gradients * min(1.0, pending / standing.trained.whole)
