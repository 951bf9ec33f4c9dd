"""Memory of a pipeline rank whose stages differ in what they save, during each of its passes.

Parameters are frozen. A stage below all trained ones saves no tensors of layers, and frozen
products defer none, so numbers of passes in flight, as means over stages, say little. Each pass of
the rank's row of the schedule is followed with the other passes in memory, by stage (`RankPass`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.activations import LayerActivations, get_layer_activations
from shardwright.planner.memory.backward_peak import compute_norm_gradient_bytes
from shardwright.planner.memory.element_counts import (
    count_group_elements,
    count_trained_elements,
)
from shardwright.planner.memory.end_activations import (
    compute_end_activation_bytes,
    compute_logit_bytes,
)
from shardwright.planner.memory.first_layer import compute_unsaved_bytes, find_first_layer
from shardwright.planner.memory.forward_peak import (
    compute_forward_bytes,
    compute_forward_gathered_bytes,
)
from shardwright.planner.memory.live_activations import (
    LiveActivations,
    compute_loss_bytes,
)
from shardwright.planner.memory.parameter_memory import (
    PersistentMemory,
    compute_gathered_bytes,
    compute_partly_reduced_bytes,
    compute_pending_reduction_bytes,
    compute_reduction_bytes,
    has_last_reduction,
)
from shardwright.planner.memory.stage_load import RankPass, StageLoad
from shardwright.planner.model_costs import LayerKind, ModelFacts
from shardwright.planner.prediction import MemoryParts


class _Stage(NamedTuple):
    """A stage of the rank, with the bytes of a pass through it."""

    layers: list[tuple[LayerKind, LayerActivations]]
    has_head: bool
    gradient_bytes: float
    """Bytes of the gradients of its weights."""
    layer_gradient_bytes: list[float]
    """Bytes of the gradients of each layer's weights."""
    input_bytes: float
    """Bytes of its input, if no layer saves that, or of the embedding's indices."""
    output_bytes: float
    """Bytes of its output, or of the last norm's input."""
    loss_bytes: float
    """Bytes of gradients that its loss has computed."""

    @property
    def end_bytes(self) -> float:
        """Bytes that a pass saves outside the layers until its backward pass."""
        return self.input_bytes + self.output_bytes + self.loss_bytes

    @property
    def saved_bytes(self) -> float:
        """Bytes that a pass saves until its backward pass."""
        return sum(layer.saved_bytes for _, layer in self.layers) + self.end_bytes

    @property
    def deferred_bytes(self) -> float:
        """Bytes that remain until the gradients of weights are computed."""
        return sum(layer.deferred_bytes for _, layer in self.layers)


class _Moment(NamedTuple):
    activations: float
    logits: float = 0.0
    workspaces: float = 0.0
    gathers: Literal["forward", "loss", "backward"] = "backward"
    """Pass of which parameters are gathered, or cast."""


def list_pass_peaks(
    facts: ModelFacts,
    candidate: Candidate,
    load: StageLoad,
    persistent: PersistentMemory,
    live: LiveActivations,
) -> list[MemoryParts]:
    """Return memory at the moments of each pass in `load.passes`: losses, forward passes of layers
    without gradients, and backward passes of the others, one layer after the other."""
    stages = _build_stages(facts, candidate, load, persistent)
    message = candidate.residual_tokens * facts.shape.hidden_size * candidate.activation_bytes
    num_others = max(0.0, load.num_in_flight - 1.0)
    gathered = {
        "forward": compute_forward_gathered_bytes(facts, candidate, load, persistent, num_others),
        **{
            name: compute_gathered_bytes(
                facts, candidate, load, persistent.parameters, should_include_root=has_root
            )
            for name, has_root in (("loss", True), ("backward", False))
        },
    }
    num_moved = _count_moved_gradients(candidate)
    is_followed = has_last_reduction(candidate, persistent)
    reduced_bytes = 0.0 if is_followed else persistent.reduced_gradients
    # Of a group whose gradients become shards in the last pass.
    change = 0.0
    if is_followed:
        change = compute_partly_reduced_bytes(facts, candidate, load, persistent)
        change -= persistent.gradients
    found = []
    for each in load.passes:
        gradients = sum(
            stage.gradient_bytes
            for stage, has_gradients in zip(stages, each.has_gradients, strict=True)
            if has_gradients
        )
        others = sum(
            num_saved * stage.saved_bytes + num_deferred * stage.deferred_bytes
            for stage, num_saved, num_deferred in zip(
                stages, each.num_saved, each.num_deferred, strict=True
            )
        )
        # A sent gradient remains until a later message shows that it has arrived.
        num_messages = each.num_early[0] + load.num_gradient_senders
        others += (num_messages - _count_shared_inputs(load, each)) * message
        num_passes = (_count_saving_passes(stages, each) + 1.0) / load.num_stages
        others += live.gather_bytes + live.table_bytes * max(1.0, num_passes)
        for moment in _list_moments(facts, candidate, load, each, stages[each.stage], change):
            found.append(
                MemoryParts(
                    weights=persistent.weights,
                    optimizer=persistent.optimizer,
                    gradients=gradients
                    + reduced_bytes * each.is_last
                    + persistent.moved.compute_gradient_bytes(num_moved[each.kind]),
                    activations=others + moment.activations,
                    logits=moment.logits,
                    gathered=gathered[moment.gathers] + persistent.moved.compute_weight_bytes(2.0),
                    workspaces=moment.workspaces,
                )
            )
    return found


def _count_moved_gradients(candidate: Candidate) -> dict[str, float]:
    """Count the blocks whose offloaded gradients are on the device in each kind of pass: in a
    forward pass, and where gradients are deferred, those that leave or return; in a backward pass
    those of a block and of the last one, and those that return for the next one."""
    has_shards = candidate.has_offloaded_shards
    is_accumulated = candidate.gradient_accumulation_steps > 1
    has_sums = has_shards and candidate.layout.zero_stage == 1
    is_returning = is_accumulated and not (candidate.has_resident_sums or has_sums)
    others = float(is_returning and not has_shards)
    return {"F": others, "I": others, "B": (2.0 - has_shards) * is_returning + 1.0}


def _count_shared_inputs(load: StageLoad, each: RankPass) -> int:
    """Count the inputs of passes that are the outputs of passes through a stage of the same rank,
    which have saved them."""
    return sum(
        each.num_saved[index] + (each.stage == index)
        for index in range(1, load.num_stages)
        if load.stages[index].layers.start == load.stages[index - 1].layers.stop
    )


def _count_saving_passes(stages: list[_Stage], each: RankPass) -> int:
    """Count the other passes whose layers have saved tensors, those of all layers included."""
    return sum(
        num_saved
        for stage, num_saved in zip(stages, each.num_saved, strict=True)
        if stage.layers[-1][0].has_backward
    )


def _list_moments(
    facts: ModelFacts,
    candidate: Candidate,
    load: StageLoad,
    each: RankPass,
    stage: _Stage,
    change: float,
) -> Iterator[_Moment]:
    if each.kind == "F":
        yield from _list_forward_moments(facts, candidate, stage)
    else:
        yield from _list_backward_moments(facts, candidate, load, each, stage, change)


def _list_forward_moments(
    facts: ModelFacts, candidate: Candidate, stage: _Stage
) -> Iterator[_Moment]:
    """List the moments of a forward pass with most in memory: of layers without gradients, next to
    the stage's input, and of the loss."""
    kinds = [kind for kind, _ in stage.layers if not kind.has_backward]
    # A layer's peak has its own input, which of the first layer is that of the stage.
    stage_input = stage.input_bytes * (len(kinds) > 1)
    for kind in {kind.slot: kind for kind in kinds}.values():
        forward = compute_forward_bytes(facts, kind, candidate)
        yield _Moment(stage_input + forward, gathers="forward")
    _, last = stage.layers[-1]
    if last.quantising_bytes:
        saved = stage.saved_bytes - stage.loss_bytes - stage.output_bytes
        yield _Moment(saved, workspaces=last.quantising_bytes, gathers="forward")
    if stage.has_head:
        logits, _ = compute_logit_bytes(facts, candidate)
        yield _Moment(stage.saved_bytes - stage.loss_bytes, logits, gathers="loss")


def _list_backward_moments(
    facts: ModelFacts,
    candidate: Candidate,
    load: StageLoad,
    each: RankPass,
    stage: _Stage,
    change: float,
) -> Iterator[_Moment]:
    """List the moments of a backward pass: of the last norm, and of each layer.

    Args:
        change: Bytes by which the reduction of a group changes gradients; 0 if those of every pass
            are reduced.
    """
    is_deferring = each.kind == "I"
    has_gradients = each.has_gradients[each.stage]
    remaining = 0.0
    # The last norm has freed its input before the layers' backward passes.
    ends = stage.input_bytes + (0.0 if stage.has_head else stage.output_bytes)
    saved = [layer.saved_bytes for _, layer in stage.layers]
    if stage.has_head:
        # Gradients of the head's weight are added to existing ones.
        is_summed = has_gradients and not candidate.is_sharded
        if facts.shape.tied_embeddings or not is_summed:
            _, remaining = compute_logit_bytes(facts, candidate)
        if facts.has_hidden_gradient:
            yield _Moment(
                sum(saved) + ends + stage.output_bytes + _compute_last_norm_bytes(facts, candidate),
                remaining,
            )
    elements = count_group_elements(facts, candidate, load, should_skip_frozen=True)
    reduction = compute_reduction_bytes(candidate, elements, is_accumulated=change != 0.0)
    if change and not each.is_last:
        reduction = 0.0
    pending = 0.0
    after = 0.0
    for index in reversed(range(len(saved))):
        kind, layer = stage.layers[index]
        if not kind.has_backward:
            break
        added = layer.deferring_gradient_bytes if is_deferring else layer.gradient_bytes
        before = sum(saved[:index]) + ends
        yield _Moment(
            before + layer.saved_bytes + layer.recomputed_bytes + added + after, remaining, pending
        )
        if is_deferring:
            after += layer.deferred_bytes
        elif not has_gradients:
            after += stage.layer_gradient_bytes[index]
        if reduction:
            yield _Moment(before + after, remaining, reduction)
            pending = compute_pending_reduction_bytes(candidate, elements)
            num_finished = len(saved) - index
            if not is_deferring and num_finished % candidate.layout.wrap_blocks == 0:
                after += change


def _compute_last_norm_bytes(facts: ModelFacts, candidate: Candidate) -> float:
    """Compute the bytes of the last norm's gradient, next to that of its output."""
    if candidate.has_fused_norms or candidate.has_fused_functions:
        return 0.0
    size = candidate.activation_bytes
    stream = candidate.residual_tokens * facts.shape.hidden_size * size
    is_fused = facts.shape.norm == "layer"
    return stream + compute_norm_gradient_bytes(stream, size, is_fused=is_fused)


def _list_layers(
    facts: ModelFacts, candidate: Candidate, layers: range
) -> list[tuple[LayerKind, LayerActivations]]:
    """List the layers of a stage. The first of the model with a gradient saves less than others."""
    found = []
    first = find_first_layer(facts)
    for layer in layers:
        kind = facts.kinds[facts.slot_of_layer[layer]]
        activations = get_layer_activations(facts, kind, candidate)
        if layer == first:
            saved = activations.saved_bytes - compute_unsaved_bytes(facts, candidate)
            activations = replace(activations, saved_bytes=saved)
        found.append((kind, activations))
    return found


def _count_gradient_elements(facts: ModelFacts, candidate: Candidate, own: StageLoad) -> float:
    """Count the trained elements of some layers whose gradients stay on the device: without those
    that are offloaded, unless FSDP2 adds them up there."""
    trained = count_trained_elements(facts, candidate, own)
    stays = candidate.has_resident_sums or (
        candidate.has_offloaded_shards
        and candidate.engine.should_store_unsharded_gradients(
            candidate.layout.zero_stage, is_accumulated=candidate.gradient_accumulation_steps > 1
        )
    )
    is_leaving = candidate.offloads_trained_weights and not stays
    return trained.local - is_leaving * trained.movable


def _count_layer_elements(facts: ModelFacts, candidate: Candidate, kind: LayerKind) -> float:
    """Count the same of one layer on this rank."""
    layers = tuple(int(each.slot == kind.slot) for each in facts.kinds)
    own = StageLoad(layers, has_embedding=False, has_head=False)
    return _count_gradient_elements(facts, candidate, own)


def _build_stages(
    facts: ModelFacts, candidate: Candidate, load: StageLoad, persistent: PersistentMemory
) -> list[_Stage]:
    message = candidate.residual_tokens * facts.shape.hidden_size * candidate.activation_bytes
    embedding_bytes, head_bytes = compute_end_activation_bytes(facts, candidate)
    num_elements = _count_gradient_elements(facts, candidate, load)
    gradient_bytes = persistent.gradients / num_elements if num_elements else 0.0
    stages = []
    for layers, num_layers in load.stages:
        kinds = [facts.kinds[facts.slot_of_layer[layer]] for layer in layers]
        has_embedding = layers.start == 0
        has_head = layers.stop == len(facts.slot_of_layer)
        own = StageLoad(num_layers, has_embedding, has_head)
        stages.append(
            _Stage(
                _list_layers(facts, candidate, layers),
                has_head,
                _count_gradient_elements(facts, candidate, own) * gradient_bytes,
                [_count_layer_elements(facts, candidate, kind) * gradient_bytes for kind in kinds],
                embedding_bytes if has_embedding else message * (not kinds[0].has_backward),
                head_bytes if has_head else message,
                compute_loss_bytes(facts, candidate) if has_head else 0.0,
            )
        )
    return stages
