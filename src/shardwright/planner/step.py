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
from shardwright.planner.communication import Group, Network, groups_of
from shardwright.planner.compute import LayerSeconds, Rates, end_seconds, layer_seconds, update_seconds, weight_bytes
from shardwright.planner.efficiency import Efficiency
from shardwright.planner.facts import Held, ModelFacts
from shardwright.planner.memory import StageLoad, adapter_elements
from shardwright.planner.pipeline import PipelineShape, StageSeconds, simulate
from shardwright.planner.prediction import TimeParts
from shardwright.planner.traffic import NOTHING, DataTraffic, Traffic, data_traffic, end_traffic, layer_traffic


class _Passes(NamedTuple):
    """Seconds of one micro-batch on one stage: compute and communication, forward and
    backward."""

    forward: float = 0.0
    backward: float = 0.0
    weight_gradient: float = 0.0
    traffic_forward: Traffic = NOTHING
    traffic_backward: Traffic = NOTHING

    @property
    def seconds(self) -> StageSeconds:
        """Seconds for the schedule's simulation, with exposed communication."""
        return StageSeconds(
            self.forward + self.traffic_forward.exposed,
            self.backward + self.traffic_backward.exposed,
            min(self.weight_gradient, self.backward),
        )


class LayerCosts:
    """Costs of layers, embedding and head for one micro-batch: the part of a candidate's cost
    that is independent of pp, ZeRO and accumulation."""

    def __init__(self, facts: ModelFacts, candidate: Candidate, rates: Rates, network: Network) -> None:
        groups = groups_of(candidate.layout)
        self.layers: list[tuple[LayerSeconds, Traffic, Traffic]] = []
        for kind in facts.kinds:
            seconds = layer_seconds(facts, kind, candidate, rates)
            forward_traffic, backward_traffic = layer_traffic(facts, kind, candidate, network, groups, seconds)
            self.layers.append(
                (seconds.awaiting_host(forward_traffic.exposed, backward_traffic.exposed), forward_traffic, backward_traffic)
            )
        self.embedding, self.head = end_seconds(facts, candidate, rates)
        self.end_forward, self.end_backward = end_traffic(facts, candidate, network, groups)
        per_layer = [kind.count * seconds.total for kind, (seconds, _, _) in zip(facts.kinds, self.layers, strict=True)]
        self.compute = sum(per_layer) + self.embedding + self.head
        """Compute seconds of a micro-batch through the whole model."""
        exposed = (
            kind.count * (forward.exposed + backward.exposed)
            for kind, (_, forward, backward) in zip(facts.kinds, self.layers, strict=True)
        )
        self.total = self.compute + sum(exposed) + (self.end_forward + self.end_backward if candidate.layout.tp > 1 else 0.0)
        """The same with the communication of tp, cp and ep."""
        contention = network.efficiency.contention
        self.going = tuple(
            seconds.forward + forward_traffic.exposed + contention * forward_traffic.hidden
            for seconds, forward_traffic, _ in self.layers
        )
        backward_seconds = (
            seconds.total - seconds.forward + backward_part.exposed + contention * backward_part.hidden
            for seconds, _, backward_part in self.layers
        )
        self.both = tuple(map(float.__add__, self.going, backward_seconds))
        """Seconds of forward and backward of a layer of each kind, with exposed communication
        and the slowdown by overlapped communication."""


class StepCosts:
    """Costs of one candidate's layers, shared by all of its stages."""

    def __init__(
        self, facts: ModelFacts, candidate: Candidate, rates: Rates, network: Network, costs: LayerCosts | None = None
    ) -> None:
        self.facts = facts
        self.candidate = candidate
        self.rates = rates
        self.network = network
        self.groups = groups_of(candidate.layout)
        self._costs = costs
        self.waits = Traffic(tensor=_waits_in_pipeline(candidate.layout, network))
        self.moving = [tuple(map(rates.moved, weight_bytes(facts, kind, candidate))) for kind in facts.kinds]

    @property
    def costs(self) -> LayerCosts:
        """Costs of the layers, computed on first use."""
        if self._costs is None:
            self._costs = LayerCosts(self.facts, self.candidate, self.rates, self.network)
        return self._costs

    def stage(self, layers: tuple[int, ...], *, embedding: bool, head: bool) -> _Passes:
        """Compute one micro-batch on a stage with `layers` of each kind."""
        forward = backward = weights = 0.0
        traffic_forward = traffic_backward = NOTHING
        costs = self.costs
        for (seconds, layer_forward, layer_backward), weight_seconds, count in zip(costs.layers, self.moving, layers, strict=True):
            if count:
                forward += count * (seconds.forward + weight_seconds[0])
                backward += count * (seconds.backward + seconds.recompute + weight_seconds[1])
                weights += count * seconds.weight_gradient
                if layer_forward is not NOTHING:
                    waits = self.waits.times(count)
                    traffic_forward = traffic_forward.plus(layer_forward.times(count)).plus(waits)
                    traffic_backward = traffic_backward.plus(layer_backward.times(count)).plus(waits)
        if embedding:
            forward += costs.embedding / 2
            backward += costs.embedding / 2
        if head:
            # The loss computes its gradients in the forward pass. It counts as backward, which
            # starts there, as schedules expect.
            backward += costs.head
        if self.candidate.layout.tp > 1:
            ends = (embedding + head) / 2
            traffic_forward = traffic_forward.plus(Traffic(tensor=costs.end_forward * ends))
            traffic_backward = traffic_backward.plus(Traffic(tensor=costs.end_backward * ends))
        return _Passes(forward, backward, weights, traffic_forward, traffic_backward)


def passes_of(costs: StepCosts, pipeline: PipelineShape) -> tuple[list[StageSeconds], float]:
    """Return seconds of a micro-batch on each kind of stage (`StageCut.kinds`), and of a send
    to the next stage."""
    kinds = _kinds_of(costs, pipeline)
    return [stage_passes.seconds for stage_passes in kinds], send_seconds(costs.facts, costs.candidate, costs.network, costs.groups)


def _kinds_of(costs: StepCosts, pipeline: PipelineShape) -> list[_Passes]:
    # Most stages and ranks are equal: each kind is computed once.
    contention = costs.network.efficiency.contention
    stages = pipeline.cut.kinds
    return [_slowed(costs.stage(layers, embedding=embedding, head=head), contention) for layers, embedding, head in stages]


Simulation = Callable[[PipelineShape, Sequence[StageSeconds], float], float]
"""(pipeline, seconds of one micro-batch on each kind of stage, seconds of a send) -> seconds of
all passes."""


def predict_time(costs: StepCosts, pipeline: PipelineShape, simulated: Simulation = simulate) -> TimeParts:
    """Predict the seconds of one optimizer step, by part, on the slowest rank.

    `simulated` returns the time of all passes: the simulation, or a lower bound of it, which
    yields a lower bound of the step.
    """
    candidate = costs.candidate
    network = costs.network
    partition = pipeline.cut
    kinds = _kinds_of(costs, pipeline)
    seconds = [stage_kind.seconds for stage_kind in kinds]
    num_micro_batches = candidate.gradient_accumulation_steps
    send = send_seconds(costs.facts, candidate, network, costs.groups)
    makespan = simulated(pipeline, seconds, send)
    by_rank = {rank: _rank_parts(costs, pipeline, kinds, rank) for rank in partition.different_ranks}
    busy = {
        rank: num_micro_batches * sum(seconds[partition.kind_of_stage[stage]].total for stage in partition.held[rank])
        for rank in by_rank
    }
    # The slowest rank is the one whose compute and data-parallel communication end last.
    slowest = max(by_rank, key=lambda rank: busy[rank] + by_rank[rank].data + by_rank[rank].optimizer)
    parts = by_rank[slowest]
    sends = 2 * num_micro_batches * send * (1 - network.efficiency.pipeline_overlap) if pipeline.num_ranks > 1 else 0.0
    waiting = max(0.0, makespan - busy[slowest])
    pipeline_exposed = min(waiting, sends)
    reference = _reference_seconds(costs, pipeline, kinds)
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
        + _congestion(candidate, network.efficiency),
        hidden_tensor=parts.hidden_tensor,
        hidden_context=parts.hidden_context,
        hidden_expert=parts.hidden_expert,
        hidden_pipeline=max(0.0, 2 * num_micro_batches * send - pipeline_exposed) if pipeline.num_ranks > 1 else 0.0,
        hidden_data=parts.hidden_data,
    )


def _reference_seconds(costs: StepCosts, pipeline: PipelineShape, kinds: list[_Passes]) -> float:
    """Compute the forward passes of all micro-batches through the reference model.

    The slowest rank's passes, plus the time in which the first micro-batch reaches it and the
    last one leaves the pipeline. With ZeRO-3 each micro-batch gathers the parameters again.
    """
    candidate = costs.candidate
    partition = pipeline.cut
    if candidate.reference == "none":
        return 0.0
    forward = [passes.seconds.forward for passes in kinds]
    by_rank = [sum(forward[partition.kind_of_stage[stage]] for stage in partition.held[rank]) for rank in partition.different_ranks]
    pipeline_seconds = sum(forward[kind] for kind in partition.kind_of_stage)
    num_micro_batches = candidate.gradient_accumulation_steps
    layout = candidate.layout
    exposed = 0.0
    if layout.zero_stage == 3 and layout.fsdp > 1:
        traffic = [rank_traffic(costs, pipeline.load_of(rank)) for rank in partition.different_ranks]
        exposed = num_micro_batches * max(
            max(rank_data.first, rank_data.gather - compute) for rank_data, compute in zip(traffic, by_rank, strict=True)
        )
    return num_micro_batches * max(by_rank) + (pipeline_seconds - max(by_rank)) + exposed


_COLLECTIVES_OF_A_PASS = 4
"""Tensor-parallel collectives in one direction through a layer: two before and two after its
matmuls."""


def _waits_in_pipeline(layout: Layout, network: Network) -> float:
    """Compute the additional seconds of a layer's tensor-parallel collectives, in one
    direction, under pipeline parallelism."""
    if layout.pp == 1 or layout.tp == 1:
        return 0.0
    return _COLLECTIVES_OF_A_PASS * (layout.tp - 1) * network.efficiency.pipelined_hop_seconds


def _congestion(candidate: Candidate, efficiency: Efficiency) -> float:
    """Compute the seconds that micro-batches wait for a network congested by pipeline sends.

    Ranks at the ends wait for two sends per micro-batch, ranks between two others for three.
    """
    pp = candidate.layout.pp
    if pp == 1 or not efficiency.congested_gpus or candidate.layout.world_size < efficiency.congested_gpus:
        return 0.0
    return turns(candidate) * efficiency.congestion_seconds * (1.5 if pp > 2 else 1.0)


def turns(candidate: Candidate) -> int:
    """Count the micro-batches that a step waits for, including the pipeline's fill."""
    return candidate.gradient_accumulation_steps + candidate.layout.pp - 1


def _slowed(passes: _Passes, contention: float) -> _Passes:
    """Add the slowdown of compute by overlapped communication."""
    forward = passes.forward + contention * passes.traffic_forward.hidden
    backward = passes.backward + contention * passes.traffic_backward.hidden
    return _Passes(forward, backward, passes.weight_gradient, passes.traffic_forward, passes.traffic_backward)


def send_seconds(facts: ModelFacts, candidate: Candidate, network: Network, groups: dict[str, Group]) -> float:
    """Compute the seconds to send a micro-batch's hidden states to the next stage."""
    if candidate.layout.pp == 1:
        return 0.0
    tokens = candidate.micro_batch_size * candidate.sequence_length / candidate.layout.cp
    if candidate.layout.sequence_parallel:
        tokens /= candidate.layout.tp
    return network.send(groups["pp"], tokens * facts.shape.hidden_size * candidate.activation_bytes)


def _rank_parts(costs: StepCosts, pipeline: PipelineShape, kinds: list[_Passes], rank: int) -> TimeParts:
    """Compute a rank's own seconds, without waiting for other ranks."""
    candidate = costs.candidate
    num_micro_batches = candidate.gradient_accumulation_steps
    stages = [kinds[pipeline.cut.kind_of_stage[stage]] for stage in pipeline.stages_of(rank)]
    forward = sum(passes.forward for passes in stages)
    backward = sum(passes.backward for passes in stages)
    traffic = NOTHING
    for passes in stages:
        traffic = traffic.plus(passes.traffic_forward).plus(passes.traffic_backward)
    load = pipeline.load_of(rank)
    exposed, hidden = data_seconds(costs, load, forward, backward)
    num_elements = owned_elements(costs, load)
    slowdown = costs.network.efficiency.contention * hidden
    return TimeParts(
        compute=num_micro_batches * (forward + backward),
        tensor=num_micro_batches * traffic.tensor,
        context=num_micro_batches * traffic.context,
        expert=num_micro_batches * traffic.expert,
        data=exposed + slowdown,
        optimizer=update_seconds(num_elements, candidate, costs.rates) + _offload_seconds(costs, num_elements),
        hidden_tensor=num_micro_batches * traffic.hidden_tensor,
        hidden_context=num_micro_batches * traffic.hidden_context,
        hidden_expert=num_micro_batches * traffic.hidden_expert,
        hidden_data=hidden,
    )


def _offload_seconds(costs: StepCosts, owned: float) -> float:
    """Compute the seconds to copy gradients to the host and weights back: 4 bytes each way over
    PCIe, about 25 GB/s."""
    return 0.0 if costs.candidate.offload == "none" else owned * 8 / 25e9


def _held(costs: StepCosts, load: StageLoad) -> tuple[Held, Held, Held]:
    """Return a rank's parameters: all its layers, one group of them, and embedding and head."""
    facts = costs.facts
    by_part = facts.held(costs.candidate.layout)
    layers = Held()
    group = Held()
    for layer, count in zip(by_part.layers, load.layers, strict=True):
        layers = layers.plus(layer.times(count))
        if count and layer.whole > group.whole:
            group = layer
    ends = Held()
    if load.embedding or (load.head and facts.shape.tied_embeddings):
        ends = ends.plus(by_part.embedding)
    if load.head:
        ends = ends.plus(by_part.head)
    return layers, group.times(min(costs.candidate.layout.wrap_blocks, max(1, sum(load.layers)))), ends


def owned_elements(costs: StepCosts, load: StageLoad) -> float:
    """Count the parameters that the rank updates."""
    zero = costs.candidate.layout.zero_stage
    if costs.candidate.adapter is not None:
        adapters = adapter_elements(costs.facts, costs.candidate, load)
        return adapters.shard if zero >= 1 else adapters.whole
    layers, _, ends = _held(costs, load)
    return layers.shard + ends.shard if zero >= 1 else layers.whole + ends.whole


def data_seconds(costs: StepCosts, load: StageLoad, forward: float, backward: float) -> tuple[float, float]:
    """Compute the seconds of data-parallel communication in a step: exposed, and overlapped
    with compute.

    Forward passes overlap with gathers, backward passes with gathers and reductions. The first
    gather and the last reduction are exposed.
    """
    candidate = costs.candidate
    return hide(candidate, costs.network, rank_traffic(costs, load), candidate.gradient_accumulation_steps, forward, backward)


def rank_traffic(costs: StepCosts, load: StageLoad) -> DataTraffic:
    """Compute the data-parallel communication of a stage. Zero with one data rank."""
    candidate = costs.candidate
    network = costs.network
    layout = costs.candidate.layout
    if layout.dp_replicate * layout.fsdp == 1:
        return DataTraffic()
    parts = _held(costs, load)
    num_groups = -(-sum(load.layers) // layout.wrap_blocks)
    if candidate.engine.gathers_tensors:
        num_groups = sum(count * kind.num_tensors for count, kind in zip(load.layers, costs.facts.kinds, strict=True))
    if candidate.adapter is not None:
        adapters = adapter_elements(costs.facts, candidate, load)
        frozen = parts if layout.zero_stage == 3 else (Held(), Held(), Held())
        gathers = data_traffic(frozen, num_groups, candidate, network, costs.groups)
        reductions = data_traffic((adapters, Held(), Held()), num_groups, candidate, network, costs.groups)
        return DataTraffic(gathers.gather, reductions.reduce, gathers.first, reductions.last, reductions.replicas)
    return data_traffic(parts, num_groups, candidate, network, costs.groups)


def hide(
    candidate: Candidate, network: Network, traffic: DataTraffic, num: int, forward: float, backward: float
) -> tuple[float, float]:
    """Return exposed and overlapped seconds of `traffic` in a step of `num` micro-batches with
    passes of this length."""
    stage = candidate.layout.zero_stage
    share = network.efficiency.data_overlap
    sharded = stage >= 1 and candidate.layout.fsdp > 1
    gathers_forward = num if stage == 3 and sharded else 1 if sharded else 0
    gathers_backward = num if stage == 3 and sharded else 0
    reduces_always = sharded and (stage == 3 or (stage == 2 and not candidate.engine.defers_stage_2))
    reductions = num if reduces_always else 1
    exposed = hidden = 0.0

    def overlap(window: float, seconds: float, exposed_part: float, num_passes: int) -> None:
        nonlocal exposed, hidden
        covered = min(share * seconds, max(0.0, window), max(0.0, seconds - exposed_part))
        exposed += num_passes * (seconds - covered)
        hidden += num_passes * covered

    if gathers_forward:
        overlap(forward, traffic.gather, traffic.first, gathers_forward)
    # The last backward pass also overlaps with the reduction over replicas, the others (stage
    # 3, or 2) with their own gathers and reductions.
    gather = traffic.gather - traffic.first if gathers_backward else 0.0
    if reductions > 1:
        overlap(backward, gather + traffic.reduce, traffic.last, reductions - 1)
    elif gathers_backward > 1:
        overlap(backward, gather, 0.0, gathers_backward - 1)
    overlap(backward, gather + traffic.reduce + traffic.replicas, traffic.last, 1)
    return exposed, hidden
