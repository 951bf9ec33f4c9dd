"""Bytes of saved activations on a rank, and what the backward passes of its layers add to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from typing import NamedTuple

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.activations import (
    LayerActivations,
    get_layer_activations,
)
from shardwright.planner.memory.end_activations import (
    compute_end_activation_bytes,
    compute_logit_bytes,
    compute_shared_table_bytes,
)
from shardwright.planner.memory.first_layer import compute_unsaved_bytes
from shardwright.planner.memory.stage_load import BackwardMoment, StageLoad
from shardwright.planner.model_costs import LayerKind, ModelFacts


class LiveActivations(NamedTuple):
    """Bytes of activations: of one pass through the rank's layers, of embedding, head and stage
    outputs in a pass, of tables shared by all layers, of pipeline messages and of gathers of
    sequence parallelism. Of the largest layer: saved, recomputed and gradients."""

    layer_bytes: float
    end_bytes: float
    table_bytes: float
    message_bytes: float
    gather_bytes: float
    num_layers: int
    """Layers through which a gradient passes, at least 1."""
    max_resident_layers: float
    """Maximum number of layers whose saved tensors are on the device; inf without offloading."""
    can_return: bool
    """True if a layer's saved tensors return during the backward pass of another one."""
    largest_layer_bytes: float
    recomputed_bytes: float
    gradient_bytes: float
    head_bytes: float
    """Input of the last norm, if the rank has the head."""
    deferring_bytes: float
    """Of the largest layer: recomputed bytes and gradients where those of weights are deferred."""
    stage_output_bytes: float
    loss_gradient_bytes: float
    """Gradients of hidden states and of the head's weight, which a loss computes in the forward
    pass, until its own backward pass."""
    deferred_layer_bytes: float
    """Bytes of one pass through the rank's layers whose gradients of weights are computed later."""
    pending_layer_bytes: float
    """Bytes of one pass through the rank's layers before or after their backward passes, at most,
    where gradients of weights are computed later. Frozen products save more than they defer."""
    backward_moments: tuple[tuple[float, float], ...]
    """Saved bytes freed before the first backward pass of a kind of layer, and bytes that this
    pass adds."""
    ending_moments: tuple[tuple[int, float], ...]
    """Of layers that are not offloaded: layers that have not finished their backward pass, and
    bytes that they saved and that the pass of the last one of them adds."""
    num_frozen_layers: int
    """Layers through which no gradient passes."""
    returning_moments: tuple[tuple[int, float], ...] = ()
    """Of offloaded layers that differ: layers that have not finished their backward pass, and bytes
    of the one that computes next to the one that returns."""

    @property
    def is_offloaded(self) -> bool:
        """True if the layers' saved tensors leave the device."""
        return self.max_resident_layers != inf

    def _compute_resident_bytes(self, in_flight: float) -> float:
        if self.max_resident_layers >= in_flight * self.num_layers:
            return in_flight * self.layer_bytes
        return min(
            in_flight * self.layer_bytes, self.max_resident_layers * self.largest_layer_bytes
        )

    def compute_saved_bytes(self, in_flight: float) -> float:
        """Compute the bytes on the device that `in_flight` passes save."""
        return (
            self._compute_resident_bytes(in_flight)
            + in_flight * self.end_bytes
            + self.table_bytes * max(1.0, in_flight)
            + self.message_bytes
            + self.gather_bytes
        )

    def list_last_backward_passes(self, load: StageLoad) -> list[tuple[int, float]]:
        """List the backward passes of the last layers of the first pass in flight, whose later
        layers are freed: layers that have not finished, and bytes on the device.

        Of offloaded layers, the one that computes and the one whose saved tensors return.
        """
        added = self.recomputed_bytes + self.gradient_bytes
        num_others = max(0.0, load.num_in_flight - 1.0)
        if not self.is_offloaded:
            others = self.compute_saved_bytes(num_others)
            return [(pending, num_bytes + others) for pending, num_bytes in self.ending_moments]
        others = self._replace(layer_bytes=0.0).compute_saved_bytes(num_others)
        if self.returning_moments:
            return [(pending, num_bytes + others) for pending, num_bytes in self.returning_moments]
        found = []
        for num_returning in range(1 + self.can_return):
            num_layers = min(
                1.0 + num_returning + load.count_staying_layers(min_gradient_share=1.0),
                load.num_in_flight * self.num_layers,
            )
            found.append(
                (1 + num_returning, num_layers * self.largest_layer_bytes + others + added)
            )
        return found

    def compute_bytes_in_backward(self, load: StageLoad, moment: BackwardMoment) -> float:
        """Compute the bytes during a backward pass: that of a stage's first layer, when its other
        layers and some passes wait for the gradients of their weights, or of its last layer if it
        defers none."""
        if self.is_offloaded:
            return self._compute_offloaded_bytes_in_backward(load, moment)
        # `end_bytes` are a mean over stages: of each pass a half of those of embedding and head,
        # which is more than the gradients that losses keep (`loss_gradient_bytes`).
        deferred = moment.num_deferred * self.deferred_layer_bytes
        if not moment.is_deferring:
            num_passes = moment.num_saved + 1.0 / load.num_stages
            added = self.recomputed_bytes + self.gradient_bytes
            return self.compute_saved_bytes(num_passes) + deferred + added
        num_layers = self.num_layers / load.num_stages
        return (
            self.compute_saved_bytes(moment.num_saved)
            + deferred
            + (num_layers - 1.0) / self.num_layers * self.pending_layer_bytes
            + self.largest_layer_bytes
            + self.deferring_bytes
        )

    def _compute_offloaded_bytes_in_backward(
        self, load: StageLoad, moment: BackwardMoment
    ) -> float:
        """Compute the bytes when inputs of the layer before leave, and saved tensors of the next
        one return, or inputs of the pass that computes gradients of weights next."""
        num_layers = self.num_layers / load.num_stages
        returning = self.can_return * self.largest_layer_bytes
        deferred = self.deferred_layer_bytes / self.num_layers
        num_passes = moment.num_saved + 1.0 / load.num_stages
        num_messages = moment.num_messages + load.num_gradient_senders
        resident = (
            (1.0 + moment.num_staying) * self.largest_layer_bytes
            + num_messages * self.stage_output_bytes
            + moment.num_losses * self.loss_gradient_bytes
            + num_passes * self.table_bytes
            + self.gather_bytes
        )
        if not moment.is_deferring:
            return resident + returning + self.recomputed_bytes + self.gradient_bytes
        leaving = self.can_return * deferred
        others = (moment.num_deferred > 0.0) * deferred
        # Of more than two layers, one returns while inputs of another one leave.
        beside = (
            leaving + max(returning, others)
            if num_layers > 2.0
            else max(leaving, returning) + others
        )
        return resident + beside + self.deferring_bytes

    def compute_offloaded_bytes(self, load: StageLoad) -> float:
        """Compute the most bytes that have left the device: of all passes but those of the last
        layer, or of some that are saved and some whose weight gradients wait."""
        if not self.is_offloaded:
            return 0.0
        saved = self.layer_bytes / load.num_stages
        deferred = self.deferred_layer_bytes / load.num_stages
        last_layer = self.deferred_layer_bytes / self.num_layers - self.largest_layer_bytes
        return max(
            0.0,
            load.num_in_flight * self.layer_bytes - self.largest_layer_bytes,
            *(
                moment.num_saved * self.layer_bytes
                - moment.num_staying * self.largest_layer_bytes
                + moment.num_deferred * self.deferred_layer_bytes
                + max(saved, deferred - (not moment.num_deferred) * last_layer)
                for moment in load.backward_moments
                if moment.is_deferring
            ),
        )


def _compute_mean_saved_bytes(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> float:
    """Compute the saved bytes of a layer, a mean over layers in FP4 and in bf16 if both exist."""
    saved = get_layer_activations(facts, kind, candidate).saved_bytes
    if candidate.num_fp4_layers is None:
        return saved
    share = min(1.0, candidate.num_fp4_layers / facts.shape.num_layers)
    in_bf16 = replace(candidate, precision="bf16", num_fp4_layers=None)
    bf16_saved = get_layer_activations(facts, kind, in_bf16).saved_bytes
    return share * saved + (1.0 - share) * bf16_saved


class _StageBytes(NamedTuple):
    """Bytes of tensors between stages: saved by a pass through all stages of the rank, messages
    that are received or sent, an output, and its gradient next to those of the layers."""

    saved: float = 0.0
    messages: float = 0.0
    output: float = 0.0
    output_gradient: float = 0.0


def _count_frozen_layers(facts: ModelFacts, load: StageLoad) -> int:
    """Count the layers through which no gradient passes."""
    kinds = zip(facts.kinds, load.layers, strict=True)
    return sum(count for kind, count in kinds if not kind.has_backward)


def _compute_stage_bytes(facts: ModelFacts, candidate: Candidate, load: StageLoad) -> _StageBytes:
    if candidate.layout.pp == 1:
        return _StageBytes()
    token_bytes = facts.shape.hidden_size * candidate.activation_bytes
    message = candidate.residual_tokens * token_bytes
    messages = load.num_stages * message  # a receive is posted before it is needed
    if candidate.engine.has_ordered_frees:
        # A sent gradient remains until a later message shows that it has arrived.
        messages += load.num_gradient_senders * message
        if load.has_head and candidate.layout.schedule == "gpipe":
            # Every loss but the one whose backward pass runs has computed its gradients.
            messages += (load.num_in_flight - 1.0) * compute_loss_bytes(facts, candidate)
    num_outputs = load.num_stages - load.has_head
    if candidate.activation_offload == "none":
        # No layer saves the input of a stage whose first layer is below all gradients.
        has_frozen_layers = _count_frozen_layers(facts, load) > 0
        num_inputs = has_frozen_layers * (load.num_stages - load.has_embedding)
        return _StageBytes((num_outputs + num_inputs) * message, messages, message)
    # Inputs that other ranks sent do not leave with their layers' saved tensors, and the gradient
    # of an output remains after the last layer has read it.
    has_gradient = num_outputs > 0 and sum(load.layers) > load.num_stages
    return _StageBytes(
        (num_outputs + load.num_gradient_senders) * message,
        messages,
        message,
        has_gradient * message,
    )


def compute_loss_bytes(facts: ModelFacts, candidate: Candidate) -> float:
    """Compute the bytes of gradients that a loss keeps: of hidden states and the head's weight."""
    token_bytes = facts.shape.hidden_size * candidate.activation_bytes
    hidden = candidate.micro_batch_tokens * token_bytes * facts.has_hidden_gradient
    return hidden + compute_logit_bytes(facts, candidate)[1]


def _compute_sequence_bytes(facts: ModelFacts, candidate: Candidate, load: StageLoad) -> float:
    """Compute the bytes of sequences that outlive their gather or reduction."""
    if candidate.layout.tp == 1 or not candidate.layout.sequence_parallel:
        return 0.0
    return candidate.engine.compute_sequence_buffer_bytes(
        candidate.micro_batch_tokens * facts.shape.hidden_size * candidate.activation_bytes,
        num_layers=sum(load.layers),
        num_passes=load.num_in_flight if candidate.layout.pp > 1 else None,
        is_accumulated=candidate.gradient_accumulation_steps > 1,
    )


def compute_live_activations(
    facts: ModelFacts, candidate: Candidate, load: StageLoad
) -> LiveActivations:
    saved = largest = deferred = deferring = 0.0
    backward = []
    kinds = []
    for kind, count in zip(facts.kinds, load.layers, strict=True):
        if count:
            layer = get_layer_activations(facts, kind, candidate)
            saved += _compute_mean_saved_bytes(facts, kind, candidate) * count
            deferred += layer.deferred_bytes * count
            deferring = max(deferring, layer.recomputed_bytes + layer.deferring_gradient_bytes)
            largest = max(largest, layer.saved_bytes)
            backward.append((layer.recomputed_bytes, layer.gradient_bytes))
            kinds.append((kind, layer))
    embedding_bytes, head_bytes = compute_end_activation_bytes(facts, candidate)
    stage = _compute_stage_bytes(facts, candidate, load)
    num_frozen_layers = _count_frozen_layers(facts, load)
    ends = load.has_embedding * embedding_bytes + load.has_head * head_bytes + stage.saved
    recomputed, gradients = candidate.engine.choose_largest_backward(backward)
    gradients += stage.output_gradient
    unsaved = _compute_unsaved_bytes(facts, candidate)
    moments: tuple[tuple[float, float], ...] = ((0.0, recomputed + gradients),)
    is_ordered = candidate.engine.has_ordered_frees and load.num_stages == 1
    returning: tuple[tuple[int, float], ...] = ()
    if is_ordered and len(kinds) > 1:
        moments = _list_backward_moments(facts, kinds, candidate, load)
        if candidate.activation_offload != "none":
            moments = moments[:1]  # of the last layer; of the others few tensors are on the device
            returning = _list_returning_moments(facts, kinds, load)
    if candidate.recompute == "mixed" and candidate.activation_offload == "none":
        # The layer with the largest saved tensors is not the one that recomputes most.
        layer = max((layer for _, layer in kinds), key=lambda layer: layer.total_bytes)
        largest = layer.saved_bytes
        recomputed = layer.recomputed_bytes
        gradients = layer.gradient_bytes
    pending = _list_pending_layers(candidate, load)
    ending = tuple((count, count * largest + recomputed + gradients) for count in pending)
    if is_ordered and len(kinds) > 1 and should_count_gathers(candidate):
        ending = _list_ending_moments(facts, kinds, load, pending)
    return LiveActivations(
        saved,
        ends - unsaved,
        compute_shared_table_bytes(facts, candidate),
        stage.messages,
        _compute_sequence_bytes(facts, candidate, load),
        max(1, sum(load.layers) - num_frozen_layers),
        load.count_resident_layers(candidate),
        sum(load.layers) > load.num_stages,
        largest,
        recomputed,
        gradients,
        head_bytes if load.has_head else 0.0,
        deferring + stage.output_gradient,
        stage.output,
        compute_loss_bytes(facts, candidate) if load.has_head else 0.0,
        deferred,
        max(deferred, saved) if facts.frozen_names else deferred,
        moments,
        tuple((count, num_bytes - unsaved) for count, num_bytes in ending),
        num_frozen_layers,
        returning,
    )


def _compute_unsaved_bytes(facts: ModelFacts, candidate: Candidate) -> float:
    """Compute what the first layer saves less; 0 where layers' saved tensors are not all on one
    device. Pipelines are followed stage by stage (`pipeline_peaks`)."""
    if candidate.layout.pp > 1 or candidate.activation_offload != "none":
        return 0.0
    return compute_unsaved_bytes(facts, candidate)


def _list_backward_moments(
    facts: ModelFacts,
    kinds: Sequence[tuple[LayerKind, LayerActivations]],
    candidate: Candidate,
    load: StageLoad,
) -> tuple[tuple[float, float], ...]:
    """List the moments in which each kind of layer is the first of its kind to run backward; with
    offloaded trained weights, also the first after the last layer, whose gradients leave."""
    layers, slots = _order_layers(facts, kinds, load)
    moments: dict[tuple[int, bool], tuple[float, float]] = {}
    freed = 0.0
    # The last pass may be an ending moment, which counts the groups that are gathered then.
    first = int(should_count_gathers(candidate))
    for slot in reversed(slots[first:]):
        layer = layers[slot]
        is_beside_leaving = candidate.offloads_trained_weights and len(moments) > 0
        moment = (freed, layer.recomputed_bytes + layer.gradient_bytes)
        moments.setdefault((slot, is_beside_leaving), moment)
        freed += layer.saved_bytes
    return tuple(moments.values())


def should_count_gathers(candidate: Candidate) -> bool:
    """Return True if each of the last backward passes is counted with the groups that are gathered
    then. Otherwise the last one is counted with a group gathered ahead, which it does not have;
    that is nearer to rehearsals of pipelines, padded rows of experts, and offloading without
    experts of other ranks."""
    layout = candidate.layout
    is_offloaded = candidate.parameter_offload != "none" or candidate.activation_offload != "none"
    return (
        candidate.engine.has_ordered_frees
        and layout.zero_stage == 3
        and layout.pp == 1
        and not (candidate.has_padding if layout.ep > 1 else is_offloaded)
    )


def _list_pending_layers(candidate: Candidate, load: StageLoad) -> Sequence[int]:
    """List how many layers have not finished in the last backward passes that may be the peak.

    FSDP2 gathers no group ahead of the last layer's pass. Earlier ones have further groups, but
    fewer gradients.
    """
    layout = candidate.layout
    if not should_count_gathers(candidate):
        return [1]
    num_layers = max(1, sum(load.layers))
    return range(1, num_layers + 1, layout.wrap_blocks)[: 1 + layout.num_gathers_ahead]


def _list_ending_moments(
    facts: ModelFacts,
    kinds: Sequence[tuple[LayerKind, LayerActivations]],
    load: StageLoad,
    pending: Sequence[int],
) -> tuple[tuple[int, float], ...]:
    """List `LiveActivations.ending_moments` of layers that differ: those with as many layers as
    `pending`, and the last one of each kind."""
    layers, slots = _order_layers(facts, kinds, load)
    counts = {*pending, *(slots.index(slot) + 1 for slot in layers)}
    saved = list(accumulate(layers[slot].saved_bytes for slot in slots))
    found = []
    for count in sorted(counts):
        layer = layers[slots[count - 1]]
        added = layer.recomputed_bytes + layer.gradient_bytes
        found.append((count, saved[count - 1] + added))
    return tuple(found)


def _list_returning_moments(
    facts: ModelFacts, kinds: Sequence[tuple[LayerKind, LayerActivations]], load: StageLoad
) -> tuple[tuple[int, float], ...]:
    """List `LiveActivations.returning_moments`: of each pair of kinds, the last one that computes
    and returns, because most gradients exist by then."""
    layers, slots = _order_layers(facts, kinds, load)
    moments: dict[tuple[int | None, int], tuple[int, float]] = {}
    for index, slot in enumerate(slots):
        previous = slots[index - 1] if index else None
        returning = layers[previous].saved_bytes if previous is not None else 0.0
        moments.setdefault((previous, slot), (index + 1, layers[slot].total_bytes + returning))
    return tuple(moments.values())


def _order_layers(
    facts: ModelFacts, kinds: Sequence[tuple[LayerKind, LayerActivations]], load: StageLoad
) -> tuple[dict[int, LayerActivations], list[int]]:
    """Return the layers by kind, and the kind of each in order. A stage that does not have all
    layers has those that save more at its end."""
    layers = {kind.slot: layer for kind, layer in kinds}
    slots = list(facts.slot_of_layer)
    if sum(load.layers) < len(slots):
        ascending = sorted(layers, key=lambda slot: layers[slot].saved_bytes)
        slots = [slot for slot in ascending for _ in range(load.layers[slot])]
    return layers, slots
