"""Costs of a micro-batch on a stage: compute and communication of its layers, embedding, loss."""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import NamedTuple

from shardwright.layout import Layout
from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.activations import get_layer_activations
from shardwright.planner.memory.attention_activations import choose_planned_kernel
from shardwright.planner.memory.moved_weights import compute_moved_weights, get_moved_bytes
from shardwright.planner.memory.weight_copies import has_saved_casts
from shardwright.planner.model_costs import LayerKind, ModelFacts, ParameterElements
from shardwright.planner.offload_costs import LayerTransfers, compute_transfer_waits
from shardwright.planner.rates.device_rates import DeviceRates
from shardwright.planner.time.communication import NetworkModel, StridedGroup, build_groups
from shardwright.planner.time.compute import (
    LayerSeconds,
    compute_end_seconds,
    compute_layer_seconds,
)
from shardwright.planner.time.memory_traffic import (
    count_repeated_quantisation_bytes,
    count_weight_traffic_bytes,
)
from shardwright.planner.time.pipeline_simulation import StageSeconds
from shardwright.planner.time.traffic import (
    NO_TRAFFIC,
    LayerTraffic,
    compute_end_traffic,
    compute_layer_traffic,
)

_NUM_TENSOR_COLLECTIVES_PER_PASS = 4
"""Tensor-parallel collectives in one direction through a layer: two before and two after its
matmuls."""


def _compute_pipelined_wait_seconds(layout: Layout, network: NetworkModel) -> float:
    """Compute the additional seconds of a layer's tensor-parallel collectives, in one
    direction, under pipeline parallelism."""
    if layout.pp == 1 or layout.tp == 1:
        return 0.0
    return (
        _NUM_TENSOR_COLLECTIVES_PER_PASS
        * (layout.tp - 1)
        * network.efficiency.pipelined_hop_seconds
    )


class StagePasses(NamedTuple):
    """Seconds of one micro-batch on one stage: compute and communication, forward and
    backward."""

    forward: float = 0.0
    backward: float = 0.0
    weight_gradient: float = 0.0
    traffic_forward: LayerTraffic = NO_TRAFFIC
    traffic_backward: LayerTraffic = NO_TRAFFIC
    offload_waits: tuple[float, float] = (0.0, 0.0)
    """Waits for offloaded activations and weights, forward and backward."""

    @property
    def stage_seconds(self) -> StageSeconds:
        """Seconds for the schedule's simulation, with exposed communication and waits."""
        return StageSeconds(
            self.forward + self.traffic_forward.exposed + self.offload_waits[0],
            self.backward + self.traffic_backward.exposed + self.offload_waits[1],
            min(self.weight_gradient, self.backward),
        )


class LayerPasses(NamedTuple):
    """Compute of a layer, with the host's delay, and its communication forward and backward."""

    seconds: LayerSeconds
    traffic_forward: LayerTraffic
    traffic_backward: LayerTraffic
    forward_seconds: float
    """Seconds of the forward pass, with exposed communication and the slowdown by overlapped
    communication."""
    pass_seconds: float
    """The same of both passes."""


def _combine_passes(
    seconds: LayerSeconds, forward: LayerTraffic, backward: LayerTraffic, contention: float
) -> LayerPasses:
    seconds = seconds.apply_host_delay(forward.exposed, backward.exposed)
    forward_seconds = seconds.forward + forward.exposed + contention * forward.hidden
    backward_seconds = (
        seconds.total - seconds.forward + backward.exposed + contention * backward.hidden
    )
    return LayerPasses(
        seconds, forward, backward, forward_seconds, forward_seconds + backward_seconds
    )


class LayerCompute:
    """Cached seconds of layers, and of embedding and head: of candidates that differ in layout,
    micro-batch, rows, recomputation (not `mixed`), chunks of the loss and settings of weights
    only."""

    def __init__(self) -> None:
        self._layers: dict[tuple[object, ...], LayerSeconds] = {}
        self._passes: dict[tuple[object, ...], LayerPasses] = {}
        self._ends: dict[tuple[object, ...], tuple[float, float]] = {}

    def get_layer_passes(
        self,
        facts: ModelFacts,
        kind: LayerKind,
        candidate: Candidate,
        rates: DeviceRates,
        network: NetworkModel,
        groups: dict[str, StridedGroup],
    ) -> LayerPasses:
        """Return a layer's compute and communication. Of layers without experts all numbers of
        expert-parallel ranks share them."""
        layout = candidate.layout
        key = None
        if not kind.shape.sparse and candidate.quantised_shares is None:
            key = (
                kind.slot,
                layout.tp,
                layout.cp,
                candidate.micro_batch_size,
                candidate.sequence_length,
                candidate.document_tokens,
                candidate.attention_loads,
                candidate.recompute,
                layout.sequence_parallel,
                layout.cp_method,
            )
            if key in self._passes:
                return self._passes[key]
        seconds = self.get_layer_seconds(facts, kind, candidate, rates)
        forward, backward = compute_layer_traffic(facts, kind, candidate, network, groups, seconds)
        passes = _combine_passes(seconds, forward, backward, network.efficiency.contention)
        if key is not None:
            self._passes[key] = passes
        return passes

    def get_layer_seconds(
        self, facts: ModelFacts, kind: LayerKind, candidate: Candidate, rates: DeviceRates
    ) -> LayerSeconds:
        """Return `compute_layer_seconds`. Methods of cp change only the kernel, and expert
        parallelism only layers with experts."""
        layout = candidate.layout
        key = (
            kind.slot,
            layout.tp,
            layout.cp,
            layout.ep if kind.shape.sparse else 1,
            candidate.micro_batch_size,
            candidate.sequence_length,
            candidate.document_tokens,
            candidate.attention_loads,
            candidate.recompute,
            layout.sequence_parallel,
            choose_planned_kernel(facts, candidate, kind.shape.window),
        )
        seconds = self._layers.get(key)
        if seconds is None:
            seconds = self._layers[key] = compute_layer_seconds(facts, kind, candidate, rates)
        return seconds

    def get_end_seconds(
        self, facts: ModelFacts, candidate: Candidate, rates: DeviceRates
    ) -> tuple[float, float]:
        """Return `compute_end_seconds`."""
        key = (
            candidate.layout.tp,
            candidate.layout.cp,
            candidate.micro_batch_size,
            candidate.sequence_length,
            candidate.loss_chunk_tokens,
        )
        seconds = self._ends.get(key)
        if seconds is None:
            seconds = self._ends[key] = compute_end_seconds(facts, candidate, rates)
        return seconds


class LayerCosts:
    """Costs of layers, embedding and head for one micro-batch: the part of a candidate's cost
    that is independent of ZeRO, and of pp and accumulation but for exchanges of weights' maxima
    under tp."""

    def __init__(
        self,
        facts: ModelFacts,
        candidate: Candidate,
        rates: DeviceRates,
        network: NetworkModel,
        compute: LayerCompute | None = None,
    ) -> None:
        compute = compute or LayerCompute()
        groups = build_groups(candidate.layout)
        self.layers = [
            compute.get_layer_passes(facts, kind, candidate, rates, network, groups)
            for kind in facts.kinds
        ]
        self.embedding_seconds, self.head_seconds = compute.get_end_seconds(facts, candidate, rates)
        self.end_forward_seconds, self.end_backward_seconds = compute_end_traffic(
            facts, candidate, network, groups
        )
        self.forward_seconds = tuple([passes.forward_seconds for passes in self.layers])
        self.pass_seconds = tuple([passes.pass_seconds for passes in self.layers])
        """Those of a layer of each kind."""


class StepCosts:
    """Costs of one candidate's layers, shared by all of its stages."""

    def __init__(
        self,
        facts: ModelFacts,
        candidate: Candidate,
        rates: DeviceRates,
        network: NetworkModel,
        layer_costs: LayerCosts | None = None,
    ) -> None:
        self.facts = facts
        self.candidate = candidate
        self.rates = rates
        self.network = network
        self.groups = build_groups(candidate.layout)
        self._layer_costs = layer_costs
        self.pipeline_wait = LayerTraffic(
            tensor=_compute_pipelined_wait_seconds(candidate.layout, network)
        )
        self.weight_seconds = [self._compute_weight_seconds(kind) for kind in facts.kinds]

    @cached_property
    def layer_costs(self) -> LayerCosts:
        """Costs of the layers, computed on first use."""
        if self._layer_costs is not None:
            return self._layer_costs
        return LayerCosts(self.facts, self.candidate, self.rates, self.network)

    def replace_rows(self, candidate: Candidate, compute: LayerCompute) -> StepCosts:
        """Return the costs of the same layout with rows of another length or other documents, which
        change no costs of weights. `compute` may have computed a part of them."""
        costs = copy(self)
        costs.candidate = candidate
        costs.layer_costs = LayerCosts(self.facts, candidate, self.rates, self.network, compute)
        return costs

    def _compute_weight_seconds(self, kind: LayerKind) -> tuple[float, float]:
        """Compute the seconds of moving and quantising a layer's weights in a micro-batch, forward
        and backward."""
        facts = self.facts
        candidate = self.candidate
        has_wide_products = self.rates.cluster.accelerator.kind != "cpu"
        moved = count_weight_traffic_bytes(
            facts, kind, candidate, has_wide_products=has_wide_products
        )
        quantised = count_repeated_quantisation_bytes(facts, kind, candidate)
        forward, backward = map(self.rates.time_copy, map(float.__add__, moved, quantised))
        return forward, backward

    def compute_stage(
        self, layers: tuple[int, ...], *, has_embedding: bool, has_head: bool
    ) -> StagePasses:
        """Compute one micro-batch on a stage with `layers` of each kind."""
        forward = backward = weights = 0.0
        traffic_forward = traffic_backward = NO_TRAFFIC
        costs = self.layer_costs
        for passes, weight_seconds, count in zip(
            costs.layers, self.weight_seconds, layers, strict=True
        ):
            if count:
                seconds, layer_forward, layer_backward, *_ = passes
                forward += count * (seconds.forward + weight_seconds[0])
                backward += count * (seconds.backward + seconds.recompute + weight_seconds[1])
                weights += count * seconds.weight_gradient
                if layer_forward is not NO_TRAFFIC:
                    traffic_forward = traffic_forward.add(layer_forward.multiply(count))
                    traffic_backward = traffic_backward.add(layer_backward.multiply(count))
                    if self.pipeline_wait.tensor:
                        waits = self.pipeline_wait.multiply(count)
                        traffic_forward = traffic_forward.add(waits)
                        if layer_backward is not NO_TRAFFIC:
                            traffic_backward = traffic_backward.add(waits)
        if has_embedding:
            forward += costs.embedding_seconds / 2
            backward += costs.embedding_seconds / 2
        if has_head:
            # The loss computes its gradients in the forward pass. It counts as backward, which
            # starts there, as schedules expect.
            backward += costs.head_seconds
        if self.candidate.layout.tp > 1:
            ends = (has_embedding + has_head) / 2
            traffic_forward = traffic_forward.add(
                LayerTraffic(tensor=costs.end_forward_seconds * ends)
            )
            has_input_gradient = has_embedding and self.facts.is_embedding_trained
            ends = (has_input_gradient + (has_head and self.facts.has_hidden_gradient)) / 2
            traffic_backward = traffic_backward.add(
                LayerTraffic(tensor=costs.end_backward_seconds * ends)
            )
        return StagePasses(
            forward,
            backward,
            weights,
            traffic_forward,
            traffic_backward,
            self._compute_offload_waits(layers),
        )

    def _compute_offload_waits(self, layers: tuple[int, ...]) -> tuple[float, float]:
        """Compute a micro-batch's waits for the saved tensors and weights of a stage's layers,
        forward and backward.

        Without a pipeline one layer's stay between the passes. The ranks of ZeRO gather a layer's
        offloaded weights when it begins.
        """
        candidate = self.candidate
        num_layers = sum(layers)
        tiers = {candidate.activation_offload, candidate.parameter_offload}
        if tiers == {"none"} or not num_layers:
            return 0.0, 0.0
        cast_bytes = candidate.engine.get_gather_bytes(candidate.activation_bytes)
        elements = self.facts.count_elements(candidate.layout).layers
        forward = backward = 0.0
        for kind, passes, layer, count in zip(
            self.facts.kinds, self.layer_costs.layers, elements, layers, strict=True
        ):
            seconds, forward_traffic, backward_traffic, *_ = passes
            activations = get_layer_activations(self.facts, kind, candidate)
            weights = compute_moved_weights(
                self.facts, candidate, tuple(int(slot == kind.slot) for slot in range(len(layers)))
            )
            gather_seconds = self._time_weight_gather(layer)
            size = cast_bytes if has_saved_casts(candidate, kind) else 0.0
            waits = compute_transfer_waits(
                candidate,
                LayerTransfers(
                    activations.saved_bytes + size * layer.local_matrices,
                    weights.weights * candidate.moves_weights,
                    weights.gradients,
                    activations.deferred_bytes,
                ),
                seconds.forward + forward_traffic.exposed,
                seconds.recompute + seconds.backward + backward_traffic.exposed,
                self.network.cluster.profile,
            )
            forward += count * (waits[0] + gather_seconds)
            backward += kind.has_backward * count * (waits[1] + gather_seconds)
        share = 1.0 - (candidate.layout.pp == 1) / num_layers
        return share * forward, share * backward

    def _time_weight_gather(self, layer: ParameterElements) -> float:
        """Compute the seconds in which the ranks of ZeRO gather a layer's frozen offloaded weights.

        FSDP2's gathers of trained ones are part of the data-parallel communication.
        """
        candidate = self.candidate
        is_moved = candidate.parameter_offload != "none" and candidate.adapter is not None
        if not is_moved or not candidate.is_sharded:
            return 0.0
        size = get_moved_bytes(candidate)
        return self.network.time_all_gather(
            self.groups["fsdp"], size * (layer.movable - layer.expert_local)
        ) + self.network.time_all_gather(self.groups["efsdp"], size * layer.expert_local)
