"""Seconds of one optimizer step: stage passes, schedule, communication, update.

The cost of a micro-batch on a stage is a sum over its layers. The waiting between stages is
simulated on the schedule that will run (`planner.pipeline`). Data-parallel communication
overlaps with the compute of a stage as far as it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log2
from typing import NamedTuple

from shardwright.layout import Layout
from shardwright.planner.candidate import Candidate
from shardwright.planner.communication import NetworkModel, StridedGroup, build_groups
from shardwright.planner.compute import (
    DeviceRates,
    LayerSeconds,
    compute_end_seconds,
    compute_layer_seconds,
    compute_update_seconds,
    count_weight_traffic_bytes,
)
from shardwright.planner.efficiency import Efficiency
from shardwright.planner.memory import StageLoad, count_adapter_elements
from shardwright.planner.model_costs import ModelFacts, ParameterElements
from shardwright.planner.pipeline import PipelineStages, StageSeconds, simulate_pipeline
from shardwright.planner.prediction import TimeParts
from shardwright.planner.traffic import (
    NO_TRAFFIC,
    DataTraffic,
    LayerTraffic,
    compute_data_traffic,
    compute_end_traffic,
    compute_layer_traffic,
)


class _StagePasses(NamedTuple):
    """Seconds of one micro-batch on one stage: compute and communication, forward and
    backward."""

    forward: float = 0.0
    backward: float = 0.0
    weight_gradient: float = 0.0
    traffic_forward: LayerTraffic = NO_TRAFFIC
    traffic_backward: LayerTraffic = NO_TRAFFIC

    @property
    def stage_seconds(self) -> StageSeconds:
        """Seconds for the schedule's simulation, with exposed communication."""
        return StageSeconds(
            self.forward + self.traffic_forward.exposed,
            self.backward + self.traffic_backward.exposed,
            min(self.weight_gradient, self.backward),
        )


class LayerCosts:
    """Costs of layers, embedding and head for one micro-batch: the part of a candidate's cost
    that is independent of pp, ZeRO and accumulation."""

    def __init__(
        self, facts: ModelFacts, candidate: Candidate, rates: DeviceRates, network: NetworkModel
    ) -> None:
        groups = build_groups(candidate.layout)
        self.layers: list[tuple[LayerSeconds, LayerTraffic, LayerTraffic]] = []
        for kind in facts.kinds:
            seconds = compute_layer_seconds(facts, kind, candidate, rates)
            forward_traffic, backward_traffic = compute_layer_traffic(
                facts, kind, candidate, network, groups, seconds
            )
            self.layers.append(
                (
                    seconds.apply_host_delay(forward_traffic.exposed, backward_traffic.exposed),
                    forward_traffic,
                    backward_traffic,
                )
            )
        self.embedding_seconds, self.head_seconds = compute_end_seconds(facts, candidate, rates)
        self.end_forward_seconds, self.end_backward_seconds = compute_end_traffic(
            facts, candidate, network, groups
        )
        per_layer = [
            kind.count * seconds.total
            for kind, (seconds, _, _) in zip(facts.kinds, self.layers, strict=True)
        ]
        self.compute_seconds = sum(per_layer) + self.embedding_seconds + self.head_seconds
        """Compute seconds of a micro-batch through the whole model."""
        exposed = (
            kind.count * (forward.exposed + backward.exposed)
            for kind, (_, forward, backward) in zip(facts.kinds, self.layers, strict=True)
        )
        self.total_seconds = (
            self.compute_seconds
            + sum(exposed)
            + (
                self.end_forward_seconds + self.end_backward_seconds
                if candidate.layout.tp > 1
                else 0.0
            )
        )
        """The same with the communication of tp, cp and ep."""
        contention = network.efficiency.contention
        self.forward_seconds = tuple(
            seconds.forward + forward_traffic.exposed + contention * forward_traffic.hidden
            for seconds, forward_traffic, _ in self.layers
        )
        backward_seconds = (
            seconds.total
            - seconds.forward
            + backward_part.exposed
            + contention * backward_part.hidden
            for seconds, _, backward_part in self.layers
        )
        self.pass_seconds = tuple(map(float.__add__, self.forward_seconds, backward_seconds))
        """Seconds of forward and backward of a layer of each kind, with exposed communication
        and the slowdown by overlapped communication."""


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
        self.weight_seconds = [
            tuple(map(rates.time_copy, count_weight_traffic_bytes(facts, kind, candidate)))
            for kind in facts.kinds
        ]

    @property
    def layer_costs(self) -> LayerCosts:
        """Costs of the layers, computed on first use."""
        if self._layer_costs is None:
            self._layer_costs = LayerCosts(self.facts, self.candidate, self.rates, self.network)
        return self._layer_costs

    def compute_stage(
        self, layers: tuple[int, ...], *, has_embedding: bool, has_head: bool
    ) -> _StagePasses:
        """Compute one micro-batch on a stage with `layers` of each kind."""
        forward = backward = weights = 0.0
        traffic_forward = traffic_backward = NO_TRAFFIC
        costs = self.layer_costs
        for (seconds, layer_forward, layer_backward), weight_seconds, count in zip(
            costs.layers, self.weight_seconds, layers, strict=True
        ):
            if count:
                forward += count * (seconds.forward + weight_seconds[0])
                backward += count * (seconds.backward + seconds.recompute + weight_seconds[1])
                weights += count * seconds.weight_gradient
                if layer_forward is not NO_TRAFFIC:
                    waits = self.pipeline_wait.multiply(count)
                    traffic_forward = traffic_forward.add(layer_forward.multiply(count)).add(waits)
                    traffic_backward = traffic_backward.add(layer_backward.multiply(count)).add(
                        waits
                    )
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
            traffic_backward = traffic_backward.add(
                LayerTraffic(tensor=costs.end_backward_seconds * ends)
            )
        return _StagePasses(forward, backward, weights, traffic_forward, traffic_backward)


def compute_stage_seconds(
    costs: StepCosts, pipeline: PipelineStages
) -> tuple[list[StageSeconds], float]:
    """Return seconds of a micro-batch on each kind of stage (`PipelinePartition.kinds`), and of a
    send to the next stage."""
    kinds = _compute_stage_passes(costs, pipeline)
    return [stage_passes.stage_seconds for stage_passes in kinds], compute_send_seconds(
        costs.facts, costs.candidate, costs.network, costs.groups
    )


def _compute_stage_passes(costs: StepCosts, pipeline: PipelineStages) -> list[_StagePasses]:
    # Most stages and ranks are equal: each kind is computed once.
    contention = costs.network.efficiency.contention
    stages = pipeline.partition.stage_kinds
    return [
        _apply_contention(
            costs.compute_stage(layers, has_embedding=embedding, has_head=head), contention
        )
        for layers, embedding, head in stages
    ]


Simulation = Callable[[PipelineStages, Sequence[StageSeconds], float], float]
"""(pipeline, seconds of one micro-batch on each kind of stage, seconds of a send) -> seconds of
all passes."""


def predict_time(
    costs: StepCosts, pipeline: PipelineStages, simulation: Simulation = simulate_pipeline
) -> TimeParts:
    """Predict the seconds of one optimizer step, by part, on the slowest rank.

    `simulation` returns the time of all passes: the simulation, or a lower bound of it, which
    yields a lower bound of the step.
    """
    candidate = costs.candidate
    network = costs.network
    partition = pipeline.partition
    kinds = _compute_stage_passes(costs, pipeline)
    seconds = [stage_kind.stage_seconds for stage_kind in kinds]
    num_micro_batches = candidate.gradient_accumulation_steps
    send = compute_send_seconds(costs.facts, candidate, network, costs.groups)
    makespan = simulation(pipeline, seconds, send)
    by_rank = {
        rank: _compute_rank_parts(costs, pipeline, kinds, rank) for rank in partition.distinct_ranks
    }
    busy = {
        rank: num_micro_batches
        * sum(
            seconds[partition.kind_of_stage[stage]].total
            for stage in partition.stages_per_rank[rank]
        )
        for rank in by_rank
    }
    # The slowest rank is the one whose compute and data-parallel communication end last.
    slowest = max(
        by_rank, key=lambda rank: busy[rank] + by_rank[rank].data + by_rank[rank].optimizer
    )
    parts = by_rank[slowest]
    sends = (
        2 * num_micro_batches * send * (1 - network.efficiency.pipeline_overlap)
        if pipeline.num_ranks > 1
        else 0.0
    )
    waiting = max(0.0, makespan - busy[slowest])
    pipeline_exposed = min(waiting, sends)
    reference = _compute_reference_seconds(costs, pipeline, kinds)
    step_seconds = makespan + parts.data + parts.optimizer + reference
    nodes = max(1.0, candidate.layout.world_size / network.cluster.domain_size)
    return TimeParts(
        compute=parts.compute,
        tensor=parts.tensor,
        context=parts.context,
        expert=parts.expert,
        pipeline=pipeline_exposed,
        data=parts.data,
        bubble=waiting - pipeline_exposed,
        optimizer=parts.optimizer,
        reference=reference,
        overhead=network.efficiency.step_seconds
        + step_seconds * network.efficiency.straggler_share * log2(nodes)
        + _compute_congestion_seconds(candidate, network.efficiency),
        hidden_tensor=parts.hidden_tensor,
        hidden_context=parts.hidden_context,
        hidden_expert=parts.hidden_expert,
        hidden_pipeline=max(0.0, 2 * num_micro_batches * send - pipeline_exposed)
        if pipeline.num_ranks > 1
        else 0.0,
        hidden_data=parts.hidden_data,
    )


def _compute_reference_seconds(
    costs: StepCosts, pipeline: PipelineStages, kinds: list[_StagePasses]
) -> float:
    """Compute the forward passes of all micro-batches through the reference model.

    The slowest rank's passes, plus the time in which the first micro-batch reaches it and the
    last one leaves the pipeline. With ZeRO-3 each micro-batch gathers the parameters again.
    """
    candidate = costs.candidate
    partition = pipeline.partition
    if candidate.reference == "none":
        return 0.0
    forward = [passes.stage_seconds.forward for passes in kinds]
    by_rank = [
        sum(forward[partition.kind_of_stage[stage]] for stage in partition.stages_per_rank[rank])
        for rank in partition.distinct_ranks
    ]
    pipeline_seconds = sum(forward[kind] for kind in partition.kind_of_stage)
    num_micro_batches = candidate.gradient_accumulation_steps
    layout = candidate.layout
    exposed = 0.0
    if layout.zero_stage == 3 and layout.fsdp > 1:
        traffic = [
            compute_rank_traffic(costs, pipeline.build_rank_load(rank))
            for rank in partition.distinct_ranks
        ]
        exposed = num_micro_batches * max(
            max(rank_data.first_gather_seconds, rank_data.gather_seconds - compute)
            for rank_data, compute in zip(traffic, by_rank, strict=True)
        )
    return num_micro_batches * max(by_rank) + (pipeline_seconds - max(by_rank)) + exposed


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


def _compute_congestion_seconds(candidate: Candidate, efficiency: Efficiency) -> float:
    """Compute the seconds that micro-batches wait for a network congested by pipeline sends.

    Ranks at the ends wait for two sends per micro-batch, ranks between two others for three.
    """
    pp = candidate.layout.pp
    if (
        pp == 1
        or not efficiency.congested_gpus
        or candidate.layout.world_size < efficiency.congested_gpus
    ):
        return 0.0
    return count_turns(candidate) * efficiency.congestion_seconds * (1.5 if pp > 2 else 1.0)


def count_turns(candidate: Candidate) -> int:
    """Count the micro-batches that a step waits for, including the pipeline's fill."""
    return candidate.gradient_accumulation_steps + candidate.layout.pp - 1


def _apply_contention(passes: _StagePasses, contention: float) -> _StagePasses:
    """Add the slowdown of compute by overlapped communication."""
    forward = passes.forward + contention * passes.traffic_forward.hidden
    backward = passes.backward + contention * passes.traffic_backward.hidden
    return _StagePasses(
        forward, backward, passes.weight_gradient, passes.traffic_forward, passes.traffic_backward
    )


def compute_send_seconds(
    facts: ModelFacts, candidate: Candidate, network: NetworkModel, groups: dict[str, StridedGroup]
) -> float:
    """Compute the seconds to send a micro-batch's hidden states to the next stage."""
    if candidate.layout.pp == 1:
        return 0.0
    tokens = candidate.micro_batch_size * candidate.sequence_length / candidate.layout.cp
    if candidate.layout.sequence_parallel:
        tokens /= candidate.layout.tp
    return network.time_send(groups["pp"], tokens * facts.shape.hidden_size * candidate.activation_bytes)


def _compute_rank_parts(
    costs: StepCosts, pipeline: PipelineStages, kinds: list[_StagePasses], rank: int
) -> TimeParts:
    """Compute a rank's own seconds, without waiting for other ranks."""
    candidate = costs.candidate
    num_micro_batches = candidate.gradient_accumulation_steps
    stages = [
        kinds[pipeline.partition.kind_of_stage[stage]] for stage in pipeline.list_rank_stages(rank)
    ]
    forward = sum(passes.forward for passes in stages)
    backward = sum(passes.backward for passes in stages)
    traffic = NO_TRAFFIC
    for passes in stages:
        traffic = traffic.add(passes.traffic_forward).add(passes.traffic_backward)
    load = pipeline.build_rank_load(rank)
    exposed, hidden = compute_data_seconds(costs, load, forward, backward)
    num_elements = count_updated_elements(costs, load)
    slowdown = costs.network.efficiency.contention * hidden
    return TimeParts(
        compute=num_micro_batches * (forward + backward),
        tensor=num_micro_batches * traffic.tensor,
        context=num_micro_batches * traffic.context,
        expert=num_micro_batches * traffic.expert,
        data=exposed + slowdown,
        optimizer=compute_update_seconds(num_elements, candidate, costs.rates)
        + _compute_offload_seconds(costs, num_elements),
        hidden_tensor=num_micro_batches * traffic.hidden_tensor,
        hidden_context=num_micro_batches * traffic.hidden_context,
        hidden_expert=num_micro_batches * traffic.hidden_expert,
        hidden_data=hidden,
    )


def _compute_offload_seconds(costs: StepCosts, num_elements: float) -> float:
    """Compute the seconds to copy gradients to the host and weights back: 4 bytes each way over
    PCIe, about 25 GB/s."""
    return 0.0 if costs.candidate.offload == "none" else num_elements * 8 / 25e9


def _sum_rank_parameters(
    costs: StepCosts, load: StageLoad
) -> tuple[ParameterElements, ParameterElements, ParameterElements]:
    """Return a rank's parameters: all its layers, one group of them, and embedding and head."""
    facts = costs.facts
    by_part = facts.count_elements(costs.candidate.layout)
    layers = ParameterElements()
    group = ParameterElements()
    for layer, count in zip(by_part.layers, load.layers, strict=True):
        layers = layers.add(layer.multiply(count))
        if count and layer.local > group.local:
            group = layer
    ends = ParameterElements()
    if load.has_embedding or (load.has_head and facts.shape.tied_embeddings):
        ends = ends.add(by_part.embedding)
    if load.has_head:
        ends = ends.add(by_part.head)
    return (
        layers,
        group.multiply(min(costs.candidate.layout.wrap_blocks, max(1, sum(load.layers)))),
        ends,
    )


def count_updated_elements(costs: StepCosts, load: StageLoad) -> float:
    """Count the parameters that the rank updates."""
    zero = costs.candidate.layout.zero_stage
    if costs.candidate.adapter is not None:
        adapters = count_adapter_elements(costs.facts, costs.candidate, load)
        return adapters.sharded if zero >= 1 else adapters.local
    layers, _, ends = _sum_rank_parameters(costs, load)
    return layers.sharded + ends.sharded if zero >= 1 else layers.local + ends.local


def compute_data_seconds(
    costs: StepCosts, load: StageLoad, forward_seconds: float, backward_seconds: float
) -> tuple[float, float]:
    """Compute the seconds of data-parallel communication in a step: exposed, and overlapped
    with compute.

    Forward passes overlap with gathers, backward passes with gathers and reductions. The first
    gather and the last reduction are exposed.
    """
    candidate = costs.candidate
    return overlap_traffic(
        candidate,
        costs.network,
        compute_rank_traffic(costs, load),
        candidate.gradient_accumulation_steps,
        forward_seconds,
        backward_seconds,
    )


def compute_rank_traffic(costs: StepCosts, load: StageLoad) -> DataTraffic:
    """Compute the data-parallel communication of a stage. Zero with one data rank."""
    candidate = costs.candidate
    network = costs.network
    layout = costs.candidate.layout
    if layout.dp_replicate * layout.fsdp == 1:
        return DataTraffic()
    parts = _sum_rank_parameters(costs, load)
    num_groups = -(-sum(load.layers) // layout.wrap_blocks)
    if candidate.conventions.should_gather_per_tensor:
        num_groups = sum(
            count * kind.num_tensors
            for count, kind in zip(load.layers, costs.facts.kinds, strict=True)
        )
    if candidate.adapter is not None:
        adapters = count_adapter_elements(costs.facts, candidate, load)
        frozen = (
            parts
            if layout.zero_stage == 3
            else (ParameterElements(), ParameterElements(), ParameterElements())
        )
        gathers = compute_data_traffic(frozen, num_groups, candidate, network, costs.groups)
        reductions = compute_data_traffic(
            (adapters, ParameterElements(), ParameterElements()),
            num_groups,
            candidate,
            network,
            costs.groups,
        )
        return DataTraffic(
            gathers.gather_seconds,
            reductions.reduce_seconds,
            gathers.first_gather_seconds,
            reductions.last_reduce_seconds,
            reductions.replica_reduce_seconds,
        )
    return compute_data_traffic(parts, num_groups, candidate, network, costs.groups)


def overlap_traffic(
    candidate: Candidate,
    network: NetworkModel,
    traffic: DataTraffic,
    num_micro_batches: int,
    forward_seconds: float,
    backward_seconds: float,
) -> tuple[float, float]:
    """Return exposed and overlapped seconds of `traffic` in a step of `num_micro_batches`
    micro-batches with passes of this length."""
    stage = candidate.layout.zero_stage
    share = network.efficiency.data_overlap
    sharded = stage >= 1 and candidate.layout.fsdp > 1
    gathers_forward = num_micro_batches if stage == 3 and sharded else 1 if sharded else 0
    gathers_backward = num_micro_batches if stage == 3 and sharded else 0
    reduces_always = sharded and (
        stage == 3 or (stage == 2 and not candidate.conventions.should_defer_stage_2)
    )
    reductions = num_micro_batches if reduces_always else 1
    exposed = hidden = 0.0

    def overlap(window: float, seconds: float, exposed_part: float, num_passes: int) -> None:
        nonlocal exposed, hidden
        covered = min(share * seconds, max(0.0, window), max(0.0, seconds - exposed_part))
        exposed += num_passes * (seconds - covered)
        hidden += num_passes * covered

    if gathers_forward:
        overlap(
            forward_seconds, traffic.gather_seconds, traffic.first_gather_seconds, gathers_forward
        )
    # The last backward pass also overlaps with the reduction over replicas, the others (stage
    # 3, or 2) with their own gathers and reductions.
    gather = traffic.gather_seconds - traffic.first_gather_seconds if gathers_backward else 0.0
    if reductions > 1:
        overlap(
            backward_seconds,
            gather + traffic.reduce_seconds,
            traffic.last_reduce_seconds,
            reductions - 1,
        )
    elif gathers_backward > 1:
        overlap(backward_seconds, gather, 0.0, gathers_backward - 1)
    overlap(
        backward_seconds,
        gather + traffic.reduce_seconds + traffic.replica_reduce_seconds,
        traffic.last_reduce_seconds,
        1,
    )
    return exposed, hidden
