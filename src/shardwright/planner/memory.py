"""Bytes on the fullest rank, by part, at the three moments of a step that can be its peak. Torch-free.

    loss        all activations in flight are kept; the loss has its logits, and for one group of parameters more than backward
    needs
    backward    activations are nearly gone, gradients are whole, buffers of the reduction are in use, the embedding gets its
    gradient
    update      neither activations nor gathered parameters; the optimizer's states are there in any case

Parts that live between steps (weights, gradients, optimizer) follow `placement.place`, the descriptor that the engine cuts by.
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
    """What one pipeline rank has to hold: layers per kind (of all its stages), the ends, and how much is in flight.

    `in_flight` counts micro-batches whose activations the rank keeps at once, as passes through all of its layers: a rank with two
    stages that keeps three passes through one of them has 1.5.
    """

    layers: tuple[int, ...]
    embedding: bool = True
    head: bool = True
    in_flight: float = 1.0
    num_stages: int = 1


class Standing(NamedTuple):
    """Bytes between steps, and elements that the moments of a step need."""

    weights: float
    gradients: float
    """What accumulates from micro-batch to micro-batch: whole, or sharded, as the stage has it."""
    reduced: float
    """The rank's shard of their sum, beside whole ones that it was made from."""
    fresh: float
    """Of one micro-batch, before they are added to those."""
    updated: float
    """What the update reads of them."""
    optimizer: float
    held: Held
    trained: Held
    at_loss: float
    """All of that beside the activations that are kept at the loss, with what sharding gathers: no micro batch, recompute or
    schedule can save it."""


def predict_memory(
    facts: ModelFacts, candidate: Candidate, load: StageLoad, efficiency: Efficiency, standing: Standing | None = None
) -> MemoryParts:
    """Bytes of one rank, by part, at its peak; `standing` where it is known already."""
    standing, live = standing or standing_of(facts, candidate, load), _activations(facts, candidate, load)
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
"""Of what a micro-batch's activations leave, what its gradients find room in: blocks are of other sizes, and in use meanwhile."""


def _apart(candidate: Candidate, standing: Standing, live: _Live, peak: MemoryParts) -> float:
    """Bytes that the allocator asks for after the peak, because nothing that was let go of is large enough, or of that stream."""
    engine, trained = candidate.engine, standing.trained
    sharded = candidate.layout.zero_stage >= 1 and candidate.layout.fsdp > 1
    later = max(0.0, standing.gradients - peak.gradients) if engine.gradients_apart and sharded else 0.0
    fresh = max(0.0, standing.gradients + standing.fresh - peak.gradients) if standing.fresh else 0.0
    if fresh:
        fresh *= fresh / (fresh + _REUSED * live.per_pass)
    copied = engine.update_bytes * (trained.shard if candidate.layout.zero_stage else trained.whole)
    return later + fresh + max(0.0, copied - peak.logits)  # logits leave blocks as large


def updated_gradients(facts: ModelFacts, candidate: Candidate, load: StageLoad) -> float:
    """Bytes of gradients that a step's backward passes leave for the update."""
    return standing_of(facts, candidate, load).updated


def least_activations(facts: ModelFacts, candidate: Candidate, load: StageLoad) -> float:
    """Bytes that one pass through a rank's layers keeps."""
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
    held = facts.held(candidate.layout)
    total = Held()
    for layer, count in zip(held.layers, load.layers, strict=True):
        total = total.plus(layer.times(count))
    if load.embedding or (load.head and facts.shape.tied_embeddings):
        total = total.plus(held.embedding)
    return total.plus(held.head) if load.head else total


def adapter_elements(facts: ModelFacts, candidate: Candidate, load: StageLoad) -> Held:
    """Elements of the low-rank matrices of a rank: A [rank, in] and B [out, rank]; each is cut where the matrix itself is."""
    adapter, layout = candidate.adapter, candidate.layout
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
            stacked = facts.shape.experts.num_experts / layout.ep if facts.shape.experts and product in kind.expert_products else 1
            total = total.plus(Held(adapter.rank * (num_in + num_out), shard).times(count * stacked))
    return total


def standing_of(facts: ModelFacts, candidate: Candidate, load: StageLoad) -> Standing:
    """What a rank holds between steps."""
    engine, stage, layout = candidate.engine, candidate.layout.zero_stage, candidate.layout
    held = _sum(facts, candidate, load)
    master = candidate.master_bytes
    trained = held if candidate.adapter is None else adapter_elements(facts, candidate, load)
    weights = _weights(facts, candidate, load, held, trained)
    if candidate.reference == "frozen":
        weights *= 2  # built, cut and held as the model is
    gradient_bytes = engine.gradient_bytes if engine.gradient_bytes is not None else float(master)
    whole_gradients = stage == 0 or (stage == 1 and (engine.whole_gradients or candidate.gradient_accumulation_steps > 1))
    whole_gradients = whole_gradients or (stage == 2 and engine.defers_stage_2 and candidate.gradient_accumulation_steps > 1)
    gradients = (trained.whole if whole_gradients else trained.shard) * gradient_bytes
    apart = whole_gradients and stage >= 1 and engine.weight_bytes is None
    reduced = trained.shard * master if apart else 0.0
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
        weights, optimizer, gradients, reduced, updated = 0.0, 0.0, 0.0, 0.0, 0.0
    at_loss = weights + optimizer + _gradients_at_loss(candidate, gradients)
    fresh = trained.whole * engine.fresh_gradient_bytes
    standing = Standing(weights, gradients, reduced, fresh, updated, optimizer, held, trained, at_loss)
    if stage == 0 or layout.fsdp == 1:
        return standing  # copies in the compute precision are the business of the micro-batches in flight
    return standing._replace(at_loss=at_loss + _gathered(facts, candidate, load, standing, root=False))


def _weights(facts: ModelFacts, candidate: Candidate, load: StageLoad, held: Held, trained: Held) -> float:
    engine, layout = candidate.engine, candidate.layout
    if candidate.adapter is not None:
        # Frozen weights are held in the compute precision; ours are FSDP2's from stage 1 on, as all parameters are.
        elements = held.shard if layout.zero_stage >= (1 if engine.weight_bytes is None else 3) else held.whole
        size = float(candidate.activation_bytes)
        frozen = elements * size
        if candidate.engine.loads_whole and layout.zero_stage == 3:
            frozen += held.whole * size
        if candidate.adapter.quantised:
            by_part = facts.held(layout)
            matrices = sum(layer.matrices * count for layer, count in zip(by_part.layers, load.layers, strict=True))
            for kind, count in zip(facts.kinds, load.layers, strict=True):
                whole = [product for product in kind.products if product.role in candidate.adapter.unquantised]
                matrices -= count * sum(product.num_in * product.num_out for product in whole) / layout.tp
            matrices *= elements / held.whole if held.whole else 0.0  # a stage without layers holds nothing
            beside = size if engine.unquantised_bytes is None else engine.unquantised_bytes
            frozen = (elements - matrices) * beside + matrices * engine.nf4_bytes
        return frozen + (trained.shard if layout.zero_stage >= 1 else trained.whole) * candidate.master_bytes
    if engine.weight_bytes is None:
        return (held.shard if layout.zero_stage >= 1 else held.whole) * candidate.master_bytes
    return (held.shard if layout.zero_stage == 3 else held.whole) * engine.weight_bytes


def _gather_size(candidate: Candidate) -> float:
    given = candidate.engine.gather_bytes
    return float(candidate.activation_bytes) if given is None else given


def _reduce_size(candidate: Candidate) -> float:
    given = candidate.engine.reduce_bytes
    return (2.0 if candidate.reduce_in_bf16 else float(candidate.master_bytes)) if given is None else given


def _group_elements(facts: ModelFacts, candidate: Candidate, load: StageLoad) -> float:
    """Elements of the largest group of blocks that is gathered together."""
    held = facts.held(candidate.layout)
    present = [layer.whole for layer, count in zip(held.layers, load.layers, strict=True) if count]
    return max(present, default=0.0) * min(candidate.layout.wrap_blocks, sum(load.layers))


def _root_elements(facts: ModelFacts, candidate: Candidate, load: StageLoad) -> float:
    """Elements gathered with the root: embedding and head of the stage."""
    held = facts.held(candidate.layout)
    elements = held.embedding.whole if load.embedding or (load.head and facts.shape.tied_embeddings) else 0.0
    return elements + (held.head.whole if load.head else 0.0)


def _gathered(facts: ModelFacts, candidate: Candidate, load: StageLoad, standing: Standing, *, root: bool) -> float:
    """Bytes of parameters in the compute precision that are not the weights themselves."""
    layout, size = candidate.layout, _gather_size(candidate)
    if candidate.adapter is not None and candidate.adapter.quantised and layout.zero_stage < 3:
        # A quantised matrix is opened for its product: one at a time.
        return max((p.num_in * p.num_out / layout.tp for k in facts.kinds for p in k.products), default=0.0) * size
    sharded = layout.zero_stage >= 1 and layout.fsdp > 1
    if layout.zero_stage == 3 and sharded:
        ahead = min(layout.prefetch_depth, layout.max_gathers_in_flight - 1)
        groups = min(1 + ahead, -(-sum(load.layers) // layout.wrap_blocks) or 1)
        return groups * _group_elements(facts, candidate, load) * size + (
            _root_elements(facts, candidate, load) * size if root else 0
        )
    if candidate.engine.weight_bytes is not None:
        return 0.0
    if sharded:
        return standing.held.whole * size
    if not candidate.engine.casts_at_use or size == candidate.master_bytes or candidate.adapter is not None:
        return 0.0
    # Casts are kept for the backward pass with the activations of the layer that made them, once per micro-batch in flight; under
    # recompute, which makes them again, only those of one layer exist.
    if candidate.recompute == "full" or (candidate.recompute == "selective" and candidate.engine.frees_in_backward):
        return _group_elements(facts, candidate, load) * size + (_root_elements(facts, candidate, load) * size if root else 0)
    layers = standing.held.matrices - _root_elements(facts, candidate, load)
    return max(0.0, layers) * size * load.in_flight + (_root_elements(facts, candidate, load) * size if root else 0)


class _Live(NamedTuple):
    """Bytes of activations: of one pass through the rank's layers, of tables that all layers share, of messages that a pipeline
    waits for; of the largest layer, what it keeps, what is rebuilt of it and what its gradients take."""

    per_pass: float
    tables: float
    messages: float
    largest: float
    rebuilt: float
    gradients: float

    def kept(self, in_flight: float) -> float:
        """By so many passes."""
        return in_flight * self.per_pass + self.tables * max(1.0, in_flight) + self.messages


def _activations(facts: ModelFacts, candidate: Candidate, load: StageLoad) -> _Live:
    kept = largest = rebuilt = gradients = 0.0
    for kind, count in zip(facts.kinds, load.layers, strict=True):
        if count:
            layer = layer_activations(facts, kind, candidate)
            share = 1.0 if candidate.fp4_layers is None else min(1.0, candidate.fp4_layers / facts.shape.num_layers)
            whole = layer if share == 1.0 else layer_activations(facts, kind, replace(candidate, precision="bf16", fp4_layers=None))
            kept += (share * layer.kept + (1.0 - share) * whole.kept) * count
            largest = max(largest, layer.kept)
            if not candidate.engine.frees_in_backward:
                rebuilt, gradients = max(rebuilt, layer.rebuilt), max(gradients, layer.gradients)
            elif layer.rebuilt + layer.gradients > rebuilt + gradients:
                rebuilt, gradients = layer.rebuilt, layer.gradients
    at_start, at_end = stage_ends(facts, candidate)
    ends = (at_start if load.embedding else 0.0) + (at_end if load.head else 0.0)
    messages = 0.0
    if candidate.layout.pp > 1:
        # A stage's output is kept until its gradient comes back; a receive is posted before it is needed.
        message = residual_tokens(candidate) * facts.shape.hidden_size * candidate.activation_bytes
        ends += (load.num_stages - load.head) * message
        messages = load.num_stages * message
    if candidate.layout.tp > 1 and candidate.layout.sequence_parallel:
        gathered = micro_batch_tokens(candidate) * facts.shape.hidden_size * candidate.activation_bytes
        messages += (candidate.engine.sequence_buffers + candidate.engine.waiting_sequences) * gathered
    return _Live(kept + ends, shared_tables(facts, candidate), messages, largest, rebuilt, gradients)


def _at_loss(facts: ModelFacts, candidate: Candidate, load: StageLoad, standing: Standing, live: _Live) -> MemoryParts:
    """The loss with its logits, the first layer of the backward pass, or the first reduction, when that layer's are gone."""
    layout = candidate.layout
    kept = live.kept(load.in_flight)
    logits, left = head_logits(facts, candidate) if load.head else (0.0, 0.0)
    gradients = _gradients_at_loss(candidate, standing.gradients)
    moments = [(kept, logits, load.head, 0.0), (kept + live.rebuilt + live.gradients, left, False, 0.0)]
    if load.head and not candidate.fused_norms:
        # The last norm's gradient, before any layer has let go of anything; the norm's output and its gradient.
        stream = residual_tokens(candidate) * facts.shape.hidden_size * candidate.activation_bytes
        spelled = facts.shape.norm != "layer"
        moments.append((kept + stream + norm_gradient(stream, candidate.activation_bytes, fused=not spelled), left, False, 0.0))
    reduction = _reduction(candidate, _group_elements(facts, candidate, load))
    if reduction:
        reduced = min(layout.wrap_blocks, sum(load.layers))
        others = kept - reduced * live.largest
        moments.append((others, left, False, reduction))
        # Beside the next group's backward pass, which under recompute makes more than the last one has let go.
        summed = _in_flight(candidate, _group_elements(facts, candidate, load))
        moments.append((others + live.rebuilt + live.gradients, left, False, summed))
    found = [
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
    return max(found, key=lambda parts: parts.total)


def _gradients_at_loss(candidate: Candidate, gradients: float) -> float:
    """Those of earlier micro-batches, and buffers that live as long as the run."""
    several, buckets = candidate.gradient_accumulation_steps > 1, _has_buckets(candidate)
    if several and buckets and candidate.engine.weight_bytes is None:
        return 2.0 * gradients  # DDP sums the earlier micro-batches outside of its buckets
    return gradients if several or buckets or candidate.engine.whole_gradients else 0.0


def _has_buckets(candidate: Candidate) -> bool:
    """Whether gradients lie in buckets that live as long as the run (DDP)."""
    return candidate.layout.zero_stage == 0 and candidate.layout.dp_replicate > 1


def _reduction(candidate: Candidate, elements: float) -> float:
    """Bytes of gradients on their way: a group's own in the compute precision, and its copy in the reduction's."""
    layout = candidate.layout
    if candidate.adapter is not None:
        return 0.0
    if layout.zero_stage >= 1 and layout.fsdp > 1:
        return elements * (_gather_size(candidate) + _reduce_size(candidate))
    if _has_buckets(candidate):
        return 2.0 * layout.bucket_size_bytes if candidate.reduce_in_bf16 else 0.0
    return 0.0


def _in_flight(candidate: Candidate, elements: float) -> float:
    """Bytes of a group's gradients that are being summed, their own copy gone."""
    sharded = candidate.layout.zero_stage >= 1 and candidate.layout.fsdp > 1 and candidate.adapter is None
    return elements * _reduce_size(candidate) if sharded else _reduction(candidate, elements)


def _at_backward(facts: ModelFacts, candidate: Candidate, load: StageLoad, standing: Standing, live: _Live) -> MemoryParts:
    """The end of the last backward pass of the steady state: one pass less in flight, the embedding's gradient being made."""
    kept = live.kept(max(0.0, load.in_flight - 1.0))
    sharded = candidate.layout.zero_stage >= 1 and candidate.layout.fsdp > 1
    # The group before is still being summed while this layer runs backward; its own gradients come as its activations go.
    workspaces = _in_flight(candidate, _group_elements(facts, candidate, load))
    workspaces = max(workspaces, _reduction(candidate, _root_elements(facts, candidate, load)) - live.largest)
    if not sharded and candidate.adapter is None and candidate.gradient_accumulation_steps > 1 and load.embedding:
        # What is added to a gradient that is there already is made first.
        workspaces += facts.held(candidate.layout).embedding.whole * candidate.master_bytes
    gradients = standing.gradients + standing.reduced + standing.fresh
    if candidate.engine.frees_in_backward and candidate.adapter is None and load.embedding:
        gradients -= _yet_to_come(facts, candidate, load, standing)
    return MemoryParts(
        weights=standing.weights,
        optimizer=standing.optimizer,
        gradients=gradients,
        activations=kept + live.rebuilt + live.gradients + live.largest,
        gathered=_gathered(facts, candidate, load, standing, root=False),
        workspaces=workspaces,
    )


def _yet_to_come(facts: ModelFacts, candidate: Candidate, load: StageLoad, standing: Standing) -> float:
    """Bytes of gradients that are not there yet when the first layer's backward pass is at its widest: the layer's own and the
    embedding's. Those of earlier micro-batches, and buckets, are there all along."""
    if _gradients_at_loss(candidate, standing.gradients) or not standing.trained.whole:
        return 0.0
    held = facts.held(candidate.layout)
    later = _group_elements(facts, candidate, load)
    later += 0.0 if facts.shape.tied_embeddings else held.embedding.whole
    return standing.gradients * min(1.0, later / standing.trained.whole)
