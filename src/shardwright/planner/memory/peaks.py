"""Bytes on the rank with the most memory, by part, at the three possible peaks of a step.

    loss      all activations in flight are saved; the loss has its logits, and one group of
              parameters is gathered beyond what the backward pass needs
    backward  most activations are freed, gradients are complete, reduction buffers are in use,
              the embedding's gradient is computed
    update    no activations or gathered parameters; optimizer states and working weights, as at
              all times

`planner.memory.parameter_memory` has the parts that persist between steps.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import NamedTuple

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.activations import (
    compute_end_activation_bytes,
    compute_logit_bytes,
    compute_shared_table_bytes,
    get_layer_activations,
)
from shardwright.planner.memory.backward_peak import compute_norm_gradient_bytes
from shardwright.planner.memory.parameter_memory import (
    PersistentMemory,
    StageLoad,
    compute_gathered_bytes,
    compute_gradient_bytes_at_loss,
    compute_offloaded_cast_bytes,
    compute_pending_gradient_bytes,
    compute_pending_reduction_bytes,
    compute_persistent_memory,
    compute_reduction_bytes,
    compute_working_bytes,
    count_group_elements,
    count_root_elements,
)
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.offload_costs import count_resident_layers
from shardwright.planner.prediction import MemoryParts
from shardwright.planner.rates.efficiency import Efficiency
from shardwright.planner.time.memory_traffic import count_quantisation_temporary_bytes


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
        *(
            _compute_backward_peak(facts, candidate, load, persistent, live, num_returning)
            for num_returning in range(1 + (live.is_offloaded and live.can_return))
        ),
        MemoryParts(
            weights=persistent.weights,
            optimizer=persistent.optimizer,
            gradients=persistent.updated_gradients,
        ),
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
            activation_bytes=live.bytes_per_pass,
        )
    )
    offloaded = (
        persistent.offloaded
        + live.compute_offloaded_bytes(load.num_in_flight)
        + compute_offloaded_cast_bytes(facts, candidate, load, persistent.parameters)
    )
    return replace(peak, reserve=reserve, driver=driver, offloaded=offloaded)


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


class _LiveActivations(NamedTuple):
    """Bytes of activations: of one pass through the rank's layers, of embedding, head and stage
    outputs in a pass, of tables shared by all layers, and of pipeline messages. Of the largest
    layer: saved, recomputed and gradients."""

    layer_bytes: float
    end_bytes: float
    table_bytes: float
    message_bytes: float
    num_layers: int
    max_resident_layers: float
    """Maximum number of layers whose saved tensors are on the device; inf without offloading."""
    can_return: bool
    """True if a layer's saved tensors return during the backward pass of another one."""
    largest_layer_bytes: float
    recomputed_bytes: float
    gradient_bytes: float

    @property
    def bytes_per_pass(self) -> float:
        """Bytes of one pass on the device."""
        return self._compute_resident_bytes(1.0) + self.end_bytes

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
        )

    def compute_bytes_in_backward(self, in_flight: float, num_returning: int) -> float:
        """Compute the bytes on the device during the backward pass of a layer of the first of
        `in_flight` passes, whose later layers are freed, while `num_returning` earlier ones return.
        """
        if not self.is_offloaded:
            return self.largest_layer_bytes + self.compute_saved_bytes(max(0.0, in_flight - 1.0))
        num_layers = min(
            self.max_resident_layers - (1 - num_returning) * self.can_return,
            in_flight * self.num_layers,
        )
        others = self._replace(layer_bytes=0.0).compute_saved_bytes(max(0.0, in_flight - 1.0))
        return num_layers * self.largest_layer_bytes + others

    def compute_offloaded_bytes(self, in_flight: float) -> float:
        """Compute the most bytes of `in_flight` passes that have left the device: all but those
        of the last layer."""
        if not self.is_offloaded:
            return 0.0
        return max(0.0, in_flight * self.layer_bytes - self.largest_layer_bytes)


def _compute_live_activations(
    facts: ModelFacts, candidate: Candidate, load: StageLoad
) -> _LiveActivations:
    saved = largest = 0.0
    backward = []
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
            backward.append((layer.recomputed_bytes, layer.gradient_bytes))
    embedding_bytes, head_bytes = compute_end_activation_bytes(facts, candidate)
    ends = (embedding_bytes if load.has_embedding else 0.0) + (head_bytes if load.has_head else 0.0)
    messages = 0.0
    if candidate.layout.pp > 1:
        # A stage's output is saved until its gradient arrives. A receive is posted before it is
        # needed.
        message = candidate.residual_tokens * facts.shape.hidden_size * candidate.activation_bytes
        ends += (load.num_stages - load.has_head) * message
        messages = load.num_stages * message
    if candidate.layout.tp > 1 and candidate.layout.sequence_parallel:
        gathered = (
            candidate.micro_batch_tokens * facts.shape.hidden_size * candidate.activation_bytes
        )
        messages += candidate.engine.compute_sequence_buffer_bytes(gathered)
    return _LiveActivations(
        saved,
        ends,
        compute_shared_table_bytes(facts, candidate),
        messages,
        sum(load.layers),
        count_resident_layers(candidate, sum(load.layers) / load.num_stages),
        sum(load.layers) > load.num_stages,
        largest,
        *candidate.engine.choose_largest_backward(backward),
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
    gradients = compute_gradient_bytes_at_loss(candidate, persistent.gradients)
    quantisation = count_quantisation_temporary_bytes(facts, candidate)
    moments = [
        (saved, logits, load.has_head, 0.0),
        (saved + live.recomputed_bytes + live.gradient_bytes, remaining, False, quantisation),
    ]
    if load.has_head and not candidate.has_fused_norms:
        # The last norm's gradient, before any layer has freed activations; the norm's output
        # and its gradient.
        stream = candidate.residual_tokens * facts.shape.hidden_size * candidate.activation_bytes
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
    reduction = compute_reduction_bytes(candidate, count_group_elements(facts, candidate, load))
    if reduction:
        # Offloaded layers return as others are freed.
        num_reduced = 0 if live.is_offloaded else min(layout.wrap_blocks, sum(load.layers))
        other_layers = saved - num_reduced * live.largest_layer_bytes
        moments.append((other_layers, remaining, False, reduction))
        # Beside the next group's backward pass, which under recomputation allocates more than
        # the last one has freed.
        in_reduction = compute_pending_reduction_bytes(
            candidate, count_group_elements(facts, candidate, load)
        )
        moments.append(
            (
                other_layers + live.recomputed_bytes + live.gradient_bytes,
                remaining,
                False,
                in_reduction + quantisation,
            )
        )
    peaks = [
        MemoryParts(
            weights=persistent.weights,
            optimizer=persistent.optimizer,
            gradients=gradients,
            activations=activations,
            logits=at_head,
            gathered=compute_gathered_bytes(
                facts, candidate, load, persistent.parameters, should_include_root=root
            ),
            workspaces=workspaces,
        )
        for activations, at_head, root, workspaces in moments
    ]
    return max(peaks, key=lambda parts: parts.total)


def _compute_backward_peak(
    facts: ModelFacts,
    candidate: Candidate,
    load: StageLoad,
    persistent: PersistentMemory,
    live: _LiveActivations,
    num_returning: int = 0,
) -> MemoryParts:
    """Return memory at the end of the last steady-state backward pass: one pass less in flight,
    the embedding's gradient in progress.

    `num_returning` is 1 for the second layer, during which the offloaded activations of the
    first one return, 0 for the first layer.
    """
    saved = live.compute_bytes_in_backward(load.num_in_flight, num_returning)
    # The previous group is still being reduced during this layer's backward pass. Its own
    # gradients are allocated as its activations are freed.
    workspaces = compute_pending_reduction_bytes(
        candidate, count_group_elements(facts, candidate, load)
    )
    workspaces = max(
        workspaces,
        compute_reduction_bytes(candidate, count_root_elements(facts, candidate, load))
        - live.largest_layer_bytes,
    )
    if (
        not candidate.is_sharded
        and candidate.adapter is None
        and candidate.gradient_accumulation_steps > 1
        and load.has_embedding
    ):
        # A gradient that is added to an existing one is allocated first.
        workspaces += (
            facts.count_elements(candidate.layout).embedding.local * candidate.master_bytes
        )
    workspaces += count_quantisation_temporary_bytes(facts, candidate)
    gradients = (
        persistent.gradients
        + persistent.reduced_gradients
        + candidate.engine.compute_micro_batch_gradient_bytes(persistent.trained_parameters.local)
    )
    if candidate.adapter is None and load.has_embedding:
        gradients -= compute_pending_gradient_bytes(
            facts, candidate, load, persistent, num_groups=1 + num_returning
        )
    return MemoryParts(
        weights=persistent.weights,
        optimizer=persistent.optimizer,
        gradients=gradients,
        activations=saved + live.recomputed_bytes + live.gradient_bytes,
        gathered=compute_gathered_bytes(
            facts, candidate, load, persistent.parameters, should_include_root=False
        ),
        workspaces=workspaces,
    )
