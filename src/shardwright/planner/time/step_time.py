"""Seconds of one optimizer step: stage passes, schedule, communication, update.

The cost of a micro-batch on a stage is a sum over its layers. The waiting between stages is
simulated on the schedule that will run (`planner.time.pipeline_simulation`). Data-parallel
communication overlaps with the compute of a stage as far as it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from math import log2

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.moved_weights import compute_moved_weights
from shardwright.planner.memory.stage_load import StageLoad
from shardwright.planner.memory.weight_copies import compute_working_bytes
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.offload_costs import (
    compute_exposed_update_seconds,
    compute_host_update_seconds,
    compute_ring_bytes,
    compute_transfer_seconds,
    count_moving_moments,
    get_transfer_rate,
    is_updated_in_backward,
)
from shardwright.planner.prediction import TimeParts
from shardwright.planner.time.communication import NetworkModel, StridedGroup
from shardwright.planner.time.data_parallel_time import (
    RankTraffic,
    compute_rank_traffic,
    count_first_elements,
    overlap_traffic,
)
from shardwright.planner.time.memory_traffic import count_weight_quantisation_bytes
from shardwright.planner.time.pipeline import PipelineStages
from shardwright.planner.time.pipeline_simulation import StageSeconds, simulate_pipeline
from shardwright.planner.time.step_costs import LayerCompute, StagePasses, StepCosts
from shardwright.planner.time.traffic import NO_TRAFFIC
from shardwright.planner.time.update_time import (
    compute_update_seconds,
    count_update_bytes,
    has_one_pass_update,
)

Simulation = Callable[[PipelineStages, Sequence[StageSeconds], float], float]
"""(pipeline, seconds of one micro-batch on each kind of stage, seconds of a send) -> seconds of
all passes."""


class PlannedStep:
    """Times of one candidate's step, without the simulation of its schedule. Each is computed on
    first use, for bounds and predictions of the candidate."""

    def __init__(
        self, costs: StepCosts, pipeline: PipelineStages, traffic: RankTraffic | None = None
    ) -> None:
        self.costs = costs
        self.pipeline = pipeline
        self._traffic = traffic or RankTraffic()

    def replace_rows(self, candidate: Candidate, compute: LayerCompute) -> PlannedStep:
        """Return the times of the same layout and stages with rows of another length or other
        documents (`StepCosts.replace_rows`)."""
        return PlannedStep(
            self.costs.replace_rows(candidate, compute), self.pipeline, self._traffic
        )

    @cached_property
    def stage_passes(self) -> list[StagePasses]:
        """Passes of a micro-batch through each kind of stage (`PipelinePartition.stage_kinds`):
        most stages and ranks are equal."""
        contention = self.costs.network.efficiency.contention
        return [
            _apply_contention(
                self.costs.compute_stage(layers, has_embedding=embedding, has_head=head), contention
            )
            for layers, embedding, head in self.pipeline.partition.stage_kinds
        ]

    @cached_property
    def stage_seconds(self) -> list[StageSeconds]:
        """Seconds of these passes."""
        return [passes.stage_seconds for passes in self.stage_passes]

    @cached_property
    def send_seconds(self) -> float:
        """Seconds of a send to the next stage."""
        costs = self.costs
        return compute_send_seconds(costs.facts, costs.candidate, costs.network, costs.groups)

    @cached_property
    def _slowest_rank(self) -> tuple[TimeParts, float]:
        """Own seconds of the rank whose compute and data-parallel communication end last, and those
        of its passes."""
        partition = self.pipeline.partition
        num_micro_batches = self.costs.candidate.gradient_accumulation_steps
        ranks = [
            (
                _compute_rank_parts(
                    self.costs, self.pipeline, self.stage_passes, rank, self._traffic
                ),
                num_micro_batches
                * sum(
                    self.stage_seconds[partition.kind_of_stage[stage]].total
                    for stage in partition.stages_per_rank[rank]
                ),
            )
            for rank in partition.distinct_ranks
        ]
        return max(ranks, key=lambda rank: rank[1] + rank[0].data + rank[0].optimizer)

    @cached_property
    def _reference_seconds(self) -> float:
        return _compute_reference_seconds(self.costs, self.pipeline, self.stage_passes)

    def predict(self, simulation: Simulation = simulate_pipeline) -> TimeParts:
        """Predict the seconds of one optimizer step, by part, on the slowest rank.

        `simulation` returns the time of all passes: the simulation, or a lower bound of it, which
        yields a lower bound of the step.
        """
        candidate = self.costs.candidate
        network = self.costs.network
        pipeline = self.pipeline
        num_micro_batches = candidate.gradient_accumulation_steps
        send = self.send_seconds
        makespan = simulation(pipeline, self.stage_seconds, send)
        parts, busy = self._slowest_rank
        sends = (
            2 * num_micro_batches * send * (1 - network.efficiency.pipeline_overlap)
            if pipeline.num_ranks > 1
            else 0.0
        )
        waiting = max(0.0, makespan - busy)
        pipeline_exposed = min(waiting, sends)
        reference = self._reference_seconds
        step_seconds = makespan + parts.data + parts.optimizer + reference
        nodes = max(1.0, candidate.layout.world_size / network.cluster.domain_size)
        return replace(
            parts,
            pipeline=pipeline_exposed,
            bubble=waiting - pipeline_exposed,
            reference=reference,
            overhead=network.efficiency.step_seconds
            + step_seconds * network.efficiency.straggler_share * log2(nodes)
            + count_turns(candidate)
            * candidate.engine.compute_message_wait_seconds(candidate.layout.pp),
            hidden_pipeline=max(0.0, 2 * num_micro_batches * send - pipeline_exposed)
            if pipeline.num_ranks > 1
            else 0.0,
        )


def _compute_reference_seconds(
    costs: StepCosts, pipeline: PipelineStages, kinds: list[StagePasses]
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


def count_turns(candidate: Candidate) -> int:
    """Count the micro-batches that a step waits for, including the pipeline's fill."""
    return candidate.gradient_accumulation_steps + candidate.layout.pp - 1


def _apply_contention(passes: StagePasses, contention: float) -> StagePasses:
    """Add the slowdown of compute by overlapped communication."""
    if not (passes.traffic_forward.hidden or passes.traffic_backward.hidden):
        return passes
    forward = passes.forward + contention * passes.traffic_forward.hidden
    backward = passes.backward + contention * passes.traffic_backward.hidden
    return passes._replace(forward=forward, backward=backward)


def compute_send_seconds(
    facts: ModelFacts, candidate: Candidate, network: NetworkModel, groups: dict[str, StridedGroup]
) -> float:
    """Compute the seconds to send a micro-batch's hidden states to the next stage."""
    if candidate.layout.pp == 1:
        return 0.0
    tokens = candidate.micro_batch_size * candidate.sequence_length / candidate.layout.cp
    if candidate.layout.sequence_parallel:
        tokens /= candidate.layout.tp
    num_bytes = tokens * facts.shape.hidden_size * candidate.activation_bytes
    return network.time_send(groups["pp"], num_bytes)


def _compute_rank_parts(
    costs: StepCosts,
    pipeline: PipelineStages,
    kinds: list[StagePasses],
    rank: int,
    traffic_of_load: RankTraffic,
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
    waits = [sum(waits) for waits in zip(*(passes.offload_waits for passes in stages), strict=True)]
    load = pipeline.build_rank_load(rank)
    # The network is also free while a layer waits for its offloaded tensors.
    data_traffic, num_elements = traffic_of_load.get(costs, load)
    exposed, hidden = overlap_traffic(
        candidate,
        costs.network,
        data_traffic,
        num_micro_batches,
        forward + waits[0],
        backward + waits[1],
    )
    compute = num_micro_batches * (forward + backward)
    slowdown = costs.network.efficiency.contention * min(hidden, compute)
    return TimeParts(
        compute=compute,
        tensor=num_micro_batches * traffic.tensor,
        context=num_micro_batches * traffic.context,
        expert=num_micro_batches * traffic.expert,
        data=exposed + slowdown,
        offload=num_micro_batches * sum(waits),
        optimizer=_compute_update_seconds(costs, load, num_elements, forward, backward)
        + _compute_cast_seconds(costs, load),
        hidden_tensor=num_micro_batches * traffic.hidden_tensor,
        hidden_context=num_micro_batches * traffic.hidden_context,
        hidden_expert=num_micro_batches * traffic.hidden_expert,
        hidden_data=hidden,
    )


def _compute_cast_seconds(costs: StepCosts, load: StageLoad) -> float:
    """Compute the seconds in which working weights are cast or quantised, once per step."""
    facts = costs.facts
    candidate = costs.candidate
    quantised_bytes = 0.0
    if candidate.has_working_operands:
        quantised_bytes = sum(
            count * sum(count_weight_quantisation_bytes(facts, kind, candidate))
            for kind, count in zip(facts.kinds, load.layers, strict=True)
        )
    num_bytes = compute_working_bytes(
        facts, candidate, load, has_codes=False, should_skip_frozen=True
    )
    if not has_one_pass_update(candidate, costs.network.cluster.accelerator.kind):
        num_bytes += num_bytes * candidate.master_bytes / candidate.activation_bytes
    return costs.rates.time_copy(num_bytes + quantised_bytes)


def _compute_update_seconds(
    costs: StepCosts,
    load: StageLoad,
    num_elements: float,
    forward_seconds: float,
    backward_seconds: float,
) -> float:
    """Compute the seconds of the update, with the transfers of offloaded states and weights.

    Args:
        forward_seconds: Time of a micro-batch's forward pass, which may hide a part of it.
        backward_seconds: Time of the last backward pass, which may hide it instead.
    """
    candidate = costs.candidate
    profile = costs.network.cluster.profile
    seconds = compute_update_seconds(num_elements, candidate, costs.rates)
    moved = compute_moved_weights(costs.facts, candidate, load.layers)
    if not num_elements or (candidate.offload == "none" and not moved.gradients):
        return seconds
    first_elements = count_first_elements(costs, load)
    num_layers = max(1, sum(load.layers))
    if candidate.is_updated_on_host:
        norm_bytes = num_elements * candidate.master_bytes
        accelerator = costs.network.cluster.accelerator
        moved_bytes = count_update_bytes(num_elements, candidate, accelerator) - norm_bytes
        return norm_bytes / costs.rates.update_bytes_per_second + compute_host_update_seconds(
            candidate,
            num_elements,
            moved.gradients / candidate.master_bytes,
            moved_bytes,
            (forward_seconds, backward_seconds),
            profile,
            first_share=first_elements / num_elements,
            num_layers=num_layers,
        )
    state_bytes = candidate.engine.get_optimizer_bytes(candidate.optimizer, candidate.master_bytes)
    layer_bytes = 0.0
    if candidate.overlaps_update:
        layer_bytes = state_bytes * (num_elements - first_elements) / max(1, num_layers - 1)
    moments = count_moving_moments(candidate, num_elements * state_bytes, layer_bytes)
    if moved.gradients:
        # The weights with gradients, in the gradients' precision.
        arriving = 2.0 * moved.gradients
        return max(
            seconds,
            compute_transfer_seconds(
                (
                    (candidate.optimizer_tier, moments, moments),
                    (candidate.parameter_offload, arriving, moved.gradients),
                ),
                profile,
            ),
        )
    is_on_disk = candidate.optimizer_tier == "disk"
    rate = get_transfer_rate("disk" if is_on_disk else "host", profile)
    update_seconds = candidate.engine.compute_offloaded_update_seconds(
        seconds, num_elements, moments, rate, costs.network.cluster.gpus_per_node
    )
    is_cpu = costs.network.cluster.accelerator.kind == "cpu"
    if not candidate.overlaps_update or (is_cpu and not is_on_disk):
        return update_seconds  # a CPU overlaps transfers of disks only
    in_backward = is_cpu and is_updated_in_backward(candidate)
    hidden_seconds = (backward_seconds if in_backward else forward_seconds) / num_layers
    if is_on_disk:  # transfers wait for staging memory, which the update of a layer frees
        hidden_seconds = min(hidden_seconds, compute_ring_bytes(candidate, layer_bytes) / rate)
    exposed_seconds = compute_exposed_update_seconds(
        update_seconds,
        first_elements / num_elements,
        hidden_seconds * (num_layers - 1),
        min(candidate.read_ahead_bytes / rate, backward_seconds),
    )
    # The update of moments on disk itself runs on training's stream.
    return max(exposed_seconds, seconds) if is_on_disk else exposed_seconds
