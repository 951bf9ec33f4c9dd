"""Seconds of one optimizer step by part: every stage's passes, the pipeline's own order of them, the data ranks' traffic, the
update.

Torch-free. What one micro-batch costs a stage is a sum over its layers; how the stages' passes wait for one another is
simulated on the
very schedule that will run (`planner.pipeline`); traffic of the data ranks hides behind what a stage computes, as far as it fits.
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
    """One micro-batch through one stage: seconds of compute and traffic, forward and backward."""

    forward: float = 0.0
    backward: float = 0.0
    weight_gradient: float = 0.0
    traffic_forward: Traffic = NOTHING
    traffic_backward: Traffic = NOTHING

    @property
    def seconds(self) -> StageSeconds:
        """As the schedule sees it."""
        return StageSeconds(
            self.forward + self.traffic_forward.exposed,
            self.backward + self.traffic_backward.exposed,
            min(self.weight_gradient, self.backward),
        )


class LayerCosts:
    """What one micro-batch costs the layers and the ends: the part of a candidate's cost that neither pp, ZeRO nor accumulation
    changes."""

    def __init__(self, facts: ModelFacts, candidate: Candidate, rates: Rates, network: Network) -> None:
        groups = groups_of(candidate.layout)
        self.layers: list[tuple[LayerSeconds, Traffic, Traffic]] = []
        for kind in facts.kinds:
            seconds = layer_seconds(facts, kind, candidate, rates)
            going, coming = layer_traffic(facts, kind, candidate, network, groups, seconds)
            self.layers.append((seconds.awaiting_host(going.exposed, coming.exposed), going, coming))
        self.embedding, self.head = end_seconds(facts, candidate, rates)
        self.end_forward, self.end_backward = end_traffic(facts, candidate, network, groups)
        per_layer = [kind.count * seconds.total for kind, (seconds, _, _) in zip(facts.kinds, self.layers, strict=True)]
        self.compute = sum(per_layer) + self.embedding + self.head
        """Seconds of a micro-batch through the whole model, traffic left out."""
        exposed = (kind.count * (go.exposed + come.exposed) for kind, (_, go, come) in zip(facts.kinds, self.layers, strict=True))
        self.total = self.compute + sum(exposed) + (self.end_forward + self.end_backward if candidate.layout.tp > 1 else 0.0)
        """The same with the traffic of tp, cp and ep."""
        slowed = network.efficiency.contention
        self.going = tuple(seconds.forward + going.exposed + slowed * going.hidden for seconds, going, _ in self.layers)
        back_up = (seconds.total - seconds.forward + back.exposed + slowed * back.hidden for seconds, _, back in self.layers)
        self.both = tuple(map(float.__add__, self.going, back_up))
        """Forward, and both passes, of a layer of each kind, with that traffic and what it slows down."""


class StepCosts:
    """What one candidate's layers cost; shared by all of its stages."""

    def __init__(
        self, facts: ModelFacts, candidate: Candidate, rates: Rates, network: Network, costs: LayerCosts | None = None
    ) -> None:
        self.facts, self.candidate, self.rates, self.network = facts, candidate, rates, network
        self.groups = groups_of(candidate.layout)
        self._costs = costs
        self.waits = Traffic(tensor=_waits_in_pipeline(candidate.layout, network))
        self.moving = [tuple(map(rates.moved, weight_bytes(facts, kind, candidate))) for kind in facts.kinds]

    @property
    def costs(self) -> LayerCosts:
        """Of the layers; worked out when they are asked for."""
        if self._costs is None:
            self._costs = LayerCosts(self.facts, self.candidate, self.rates, self.network)
        return self._costs

    def stage(self, layers: tuple[int, ...], *, embedding: bool, head: bool) -> _Passes:
        """One micro-batch through a stage with so many layers of each kind."""
        forward = backward = weights = 0.0
        traffic_forward = traffic_backward = NOTHING
        costs = self.costs
        for (seconds, going, coming), moving, count in zip(costs.layers, self.moving, layers, strict=True):
            if count:
                forward += count * (seconds.forward + moving[0])
                backward += count * (seconds.backward + seconds.recompute + moving[1])
                weights += count * seconds.weight_gradient
                if going is not NOTHING:
                    waits = self.waits.times(count)
                    traffic_forward = traffic_forward.plus(going.times(count)).plus(waits)
                    traffic_backward = traffic_backward.plus(coming.times(count)).plus(waits)
        if embedding:
            forward, backward = forward + costs.embedding / 2, backward + costs.embedding / 2
        if head:
            # The loss makes its gradients in the forward pass; it is where the backward pass begins, so a schedule sees it there.
            backward += costs.head
        if self.candidate.layout.tp > 1:
            ends = (embedding + head) / 2
            traffic_forward = traffic_forward.plus(Traffic(tensor=costs.end_forward * ends))
            traffic_backward = traffic_backward.plus(Traffic(tensor=costs.end_backward * ends))
        return _Passes(forward, backward, weights, traffic_forward, traffic_backward)


def passes_of(costs: StepCosts, pipeline: PipelineShape) -> tuple[list[StageSeconds], float]:
    """Seconds of a micro-batch through each kind of stage (`StageCut.kinds`), and of a send to the next one."""
    kinds = _kinds_of(costs, pipeline)
    return [each.seconds for each in kinds], send_seconds(costs.facts, costs.candidate, costs.network, costs.groups)


def _kinds_of(costs: StepCosts, pipeline: PipelineShape) -> list[_Passes]:
    # Most stages, and most ranks, are alike: each kind is worked out once.
    contention = costs.network.efficiency.contention
    stages = pipeline.cut.kinds
    return [_slowed(costs.stage(layers, embedding=embedding, head=head), contention) for layers, embedding, head in stages]


Simulation = Callable[[PipelineShape, Sequence[StageSeconds], float], float]
"""(pipeline, one micro-batch through each kind of stage, seconds of a send) -> seconds."""


def predict_time(costs: StepCosts, pipeline: PipelineShape, simulated: Simulation = simulate) -> TimeParts:
    """Seconds of one optimizer step, by part, on the rank that takes longest.

    `simulated` says how long the passes of all stages take: the simulation, or a bound of it, which gives a bound of the step.
    """
    candidate, network, cut = costs.candidate, costs.network, pipeline.cut
    kinds = _kinds_of(costs, pipeline)
    seconds = [each.seconds for each in kinds]
    num = candidate.gradient_accumulation_steps
    send = send_seconds(costs.facts, candidate, network, costs.groups)
    makespan = simulated(pipeline, seconds, send)
    by_rank = {rank: _rank_parts(costs, pipeline, kinds, rank) for rank in cut.different_ranks}
    busy = {rank: num * sum(seconds[cut.kind_of_stage[stage]].total for stage in cut.held[rank]) for rank in by_rank}
    # The slowest rank is the one whose work and data traffic end last.
    slowest = max(by_rank, key=lambda rank: busy[rank] + by_rank[rank].data + by_rank[rank].optimizer)
    parts = by_rank[slowest]
    sends = 2 * num * send * (1 - network.efficiency.pipeline_overlap) if pipeline.num_ranks > 1 else 0.0
    waiting = max(0.0, makespan - busy[slowest])
    pipeline_exposed = min(waiting, sends)
    reference = _reference_seconds(costs, pipeline, kinds)
    spent = makespan + parts.data + parts.optimizer + reference
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
        + spent * network.efficiency.straggler_share * log2(nodes)
        + _congestion(candidate, network.efficiency),
        hidden_tensor=parts.hidden_tensor,
        hidden_context=parts.hidden_context,
        hidden_expert=parts.hidden_expert,
        hidden_pipeline=max(0.0, 2 * num * send - pipeline_exposed) if pipeline.num_ranks > 1 else 0.0,
        hidden_data=parts.hidden_data,
    )


def _reference_seconds(costs: StepCosts, pipeline: PipelineShape, kinds: list[_Passes]) -> float:
    """Forward passes of all micro-batches through the reference: the slowest rank's, after the first has come down to it and before
    the last has gone on. With everything sharded each gathers its parameters anew."""
    candidate, cut = costs.candidate, pipeline.cut
    if candidate.reference == "none":
        return 0.0
    going = [passes.seconds.forward for passes in kinds]
    by_rank = [sum(going[cut.kind_of_stage[stage]] for stage in cut.held[rank]) for rank in cut.different_ranks]
    once = sum(going[kind] for kind in cut.kind_of_stage)
    num, layout = candidate.gradient_accumulation_steps, candidate.layout
    exposed = 0.0
    if layout.zero_stage == 3 and layout.fsdp > 1:
        traffic = [rank_traffic(costs, pipeline.load_of(rank)) for rank in cut.different_ranks]
        exposed = num * max(max(each.first, each.gather - mine) for each, mine in zip(traffic, by_rank, strict=True))
    return num * max(by_rank) + (once - max(by_rank)) + exposed


_COLLECTIVES_OF_A_PASS = 4
"""Of tensor parallelism in one direction through a layer: two before, two after its products."""


def _waits_in_pipeline(layout: Layout, network: Network) -> float:
    """Seconds that a layer's tensor-parallel collectives wait longer, in one direction, where the ranks are also pipelined."""
    if layout.pp == 1 or layout.tp == 1:
        return 0.0
    return _COLLECTIVES_OF_A_PASS * (layout.tp - 1) * network.efficiency.pipelined_hop_seconds


def _congestion(candidate: Candidate, efficiency: Efficiency) -> float:
    """Seconds that a pipeline's micro-batches wait for a network that cannot serve the sends of so many: a rank between two others
    has three of them to wait for in each turn, at either end there are two."""
    pp = candidate.layout.pp
    if pp == 1 or not efficiency.congested_gpus or candidate.layout.world_size < efficiency.congested_gpus:
        return 0.0
    return turns(candidate) * efficiency.congestion_seconds * (1.5 if pp > 2 else 1.0)


def turns(candidate: Candidate) -> int:
    """Micro-batches that a step waits for, those among them in which a pipeline fills."""
    return candidate.gradient_accumulation_steps + candidate.layout.pp - 1


def _slowed(passes: _Passes, contention: float) -> _Passes:
    """Compute takes longer while traffic runs beside it."""
    forward = passes.forward + contention * passes.traffic_forward.hidden
    backward = passes.backward + contention * passes.traffic_backward.hidden
    return _Passes(forward, backward, passes.weight_gradient, passes.traffic_forward, passes.traffic_backward)


def send_seconds(facts: ModelFacts, candidate: Candidate, network: Network, groups: dict[str, Group]) -> float:
    """Seconds that a micro-batch's hidden states take to the next stage."""
    if candidate.layout.pp == 1:
        return 0.0
    tokens = candidate.micro_batch_size * candidate.sequence_length / candidate.layout.cp
    if candidate.layout.sequence_parallel:
        tokens /= candidate.layout.tp
    return network.send(groups["pp"], tokens * facts.shape.hidden_size * candidate.activation_bytes)


def _rank_parts(costs: StepCosts, pipeline: PipelineShape, kinds: list[_Passes], rank: int) -> TimeParts:
    """A rank's own seconds, waiting for others left out."""
    candidate = costs.candidate
    num = candidate.gradient_accumulation_steps
    mine = [kinds[pipeline.cut.kind_of_stage[stage]] for stage in pipeline.stages_of(rank)]
    forward, backward = sum(each.forward for each in mine), sum(each.backward for each in mine)
    traffic = NOTHING
    for each in mine:
        traffic = traffic.plus(each.traffic_forward).plus(each.traffic_backward)
    load = pipeline.load_of(rank)
    exposed, hidden = data_seconds(costs, load, forward, backward)
    owned = owned_elements(costs, load)
    slowdown = costs.network.efficiency.contention * hidden
    return TimeParts(
        compute=num * (forward + backward),
        tensor=num * traffic.tensor,
        context=num * traffic.context,
        expert=num * traffic.expert,
        data=exposed + slowdown,
        optimizer=update_seconds(owned, candidate, costs.rates) + _offload_seconds(costs, owned),
        hidden_tensor=num * traffic.hidden_tensor,
        hidden_context=num * traffic.hidden_context,
        hidden_expert=num * traffic.hidden_expert,
        hidden_data=hidden,
    )


def _offload_seconds(costs: StepCosts, owned: float) -> float:
    """Gradients down to the host's memory, weights up again: 4 bytes each way over PCIe, about 25 GB/s."""
    return 0.0 if costs.candidate.offload == "none" else owned * 8 / 25e9


def _held(costs: StepCosts, load: StageLoad) -> tuple[Held, Held, Held]:
    """Of a rank: what all its layers hold, what one group of them holds, and what the ends hold."""
    facts = costs.facts
    held = facts.held(costs.candidate.layout)
    layers, group = Held(), Held()
    for layer, count in zip(held.layers, load.layers, strict=True):
        layers = layers.plus(layer.times(count))
        if count and layer.whole > group.whole:
            group = layer
    ends = Held()
    if load.embedding or (load.head and facts.shape.tied_embeddings):
        ends = ends.plus(held.embedding)
    if load.head:
        ends = ends.plus(held.head)
    return layers, group.times(min(costs.candidate.layout.wrap_blocks, max(1, sum(load.layers)))), ends


def owned_elements(costs: StepCosts, load: StageLoad) -> float:
    """Parameters that the rank updates."""
    zero = costs.candidate.layout.zero_stage
    if costs.candidate.adapter is not None:
        adapters = adapter_elements(costs.facts, costs.candidate, load)
        return adapters.shard if zero >= 1 else adapters.whole
    layers, _, ends = _held(costs, load)
    return layers.shard + ends.shard if zero >= 1 else layers.whole + ends.whole


def data_seconds(costs: StepCosts, load: StageLoad, forward: float, backward: float) -> tuple[float, float]:
    """Seconds of the data ranks' traffic in a step: exposed, and hidden behind compute.

    Forward passes hide gathers; backward passes hide gathers and reductions. What is first gathered and what is last reduced has
    nothing to hide behind.
    """
    candidate = costs.candidate
    return hide(candidate, costs.network, rank_traffic(costs, load), candidate.gradient_accumulation_steps, forward, backward)


def rank_traffic(costs: StepCosts, load: StageLoad) -> DataTraffic:
    """What the data ranks of a stage send; nothing where there is one."""
    candidate, network, layout = costs.candidate, costs.network, costs.candidate.layout
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
        sums = data_traffic((adapters, Held(), Held()), num_groups, candidate, network, costs.groups)
        return DataTraffic(gathers.gather, sums.reduce, gathers.first, sums.last, sums.replicas)
    return data_traffic(parts, num_groups, candidate, network, costs.groups)


def hide(
    candidate: Candidate, network: Network, traffic: DataTraffic, num: int, forward: float, backward: float
) -> tuple[float, float]:
    """Seconds of `traffic` in a step of `num` micro-batches: exposed, and hidden behind so long a forward and backward pass."""
    stage, share = candidate.layout.zero_stage, network.efficiency.data_overlap
    sharded = stage >= 1 and candidate.layout.fsdp > 1
    gathers_forward = num if stage == 3 and sharded else 1 if sharded else 0
    gathers_backward = num if stage == 3 and sharded else 0
    every = sharded and (stage == 3 or (stage == 2 and not candidate.engine.defers_stage_2))
    reductions = num if every else 1
    exposed = hidden = 0.0

    def pass_by(window: float, wanted: float, bare: float, times: int) -> None:
        nonlocal exposed, hidden
        covered = min(share * wanted, max(0.0, window), max(0.0, wanted - bare))
        exposed += times * (wanted - covered)
        hidden += times * covered

    if gathers_forward:
        pass_by(forward, traffic.gather, traffic.first, gathers_forward)
    # The last backward pass also carries the sum over replicas, the others (at stage 3, or 2) their own gathers and reductions.
    gather = traffic.gather - traffic.first if gathers_backward else 0.0
    if reductions > 1:
        pass_by(backward, gather + traffic.reduce, traffic.last, reductions - 1)
    elif gathers_backward > 1:
        pass_by(backward, gather, 0.0, gathers_backward - 1)
    pass_by(backward, gather + traffic.reduce + traffic.replicas, traffic.last, 1)
    return exposed, hidden
