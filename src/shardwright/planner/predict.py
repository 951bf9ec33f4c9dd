"""Prediction of the memory and time of one candidate on one cluster."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from shardwright.architecture import ModelShape
from shardwright.hardware import Cluster
from shardwright.planner.candidate import Candidate
from shardwright.planner.communication import Network
from shardwright.planner.compute import Rates
from shardwright.planner.efficiency import Efficiency
from shardwright.planner.facts import ModelFacts, facts_of
from shardwright.planner.memory import predict_memory
from shardwright.planner.pipeline import PipelineShape, bound_simulation, pipeline_of, was_simulated
from shardwright.planner.prediction import MemoryParts, Prediction
from shardwright.planner.step import LayerCosts, StepCosts, passes_of, predict_time, turns


def predict(shape: ModelShape, candidate: Candidate, cluster: Cluster, efficiency: Efficiency) -> Prediction:
    """Predict memory and time of one optimizer step of `candidate` on `cluster`.

    The candidate's layout must divide the model and the batch (see `planner.rules`). Its world
    size may be smaller than the cluster; it then uses the first ranks.

    Raises:
        InputError: the accelerator has no units for the precision, or the schedule does not
            support the number of micro-batches.
    """
    return Predictor(facts_of(shape), cluster, efficiency).predict(candidate)


class Predictor:
    """Predictor of many candidates of one model on one cluster. Caches rates and
    collectives."""

    def __init__(self, facts: ModelFacts, cluster: Cluster, efficiency: Efficiency) -> None:
        self.facts = facts
        self.cluster = cluster
        self.efficiency = efficiency
        self.network = Network(cluster, efficiency)
        self._rates: dict[str, Rates] = {}

    def rates(self, precision: str) -> Rates:
        """Return the cached rates of the device in a precision."""
        rates = self._rates.get(precision)
        if rates is None:
            rates = self._rates[precision] = Rates(self.cluster, self.efficiency, precision)
        return rates

    @cached_property
    def capacity(self) -> float:
        """Bytes of one device that a run may plan to fill."""
        profile = self.cluster.profile
        return (self.cluster.accelerator.memory_bytes if profile is None else profile.memory_bytes) * self.efficiency.usable_share

    def layer_costs(self, candidate: Candidate) -> LayerCosts:
        """Compute the layer costs of one micro-batch of the candidate."""
        return LayerCosts(self.facts, candidate, self.rates(candidate.precision), self.network)

    def pipeline(self, candidate: Candidate) -> PipelineShape:
        """Return the stages of the candidate and their schedule."""
        steps = candidate.gradient_accumulation_steps
        rule = candidate.engine.stage_rule
        return pipeline_of(self.facts, candidate.layout, steps, candidate.sequence_length, rule)

    def memory(self, candidate: Candidate, pipeline: PipelineShape) -> MemoryParts:
        """Compute the memory of the rank that needs the most."""
        if self.cluster.accelerator.kind == "cpu":
            candidate = replace(candidate, fused_norms=False)
        loads = (predict_memory(self.facts, candidate, load, self.efficiency) for load in pipeline.loads)
        return max(loads, key=lambda parts: parts.total)

    def pass_bound(self, candidate: Candidate, layer_costs: LayerCosts) -> float:
        """Return minimum seconds of a step's passes, from earlier simulations of the schedule.
        0 if there are none."""
        pipeline = self.pipeline(candidate)
        if not was_simulated(pipeline):
            return 0.0
        costs = StepCosts(self.facts, candidate, self.rates(candidate.precision), self.network, layer_costs)
        return bound_simulation(pipeline, *passes_of(costs, pipeline))

    def bound(self, candidate: Candidate, layer_costs: LayerCosts) -> float:
        """Return minimum seconds of the whole step, from earlier simulations of the
        schedule."""
        costs = StepCosts(self.facts, candidate, self.rates(candidate.precision), self.network, layer_costs)
        return predict_time(costs, self.pipeline(candidate), bound_simulation).step

    def predict(self, candidate: Candidate, memory: MemoryParts | None = None, layer_costs: LayerCosts | None = None) -> Prediction:
        """Predict memory and time. Pass `memory` and `layer_costs` if they are already
        known."""
        pipeline = self.pipeline(candidate)
        rates = self.rates(candidate.precision)
        costs = StepCosts(self.facts, candidate, rates, self.network, layer_costs)
        tokens = min(candidate.sequence_length, candidate.document_tokens or candidate.sequence_length)
        flops = self.facts.model_flops_per_token(tokens, frozen=candidate.adapter is not None)
        memory = memory or self.memory(candidate, pipeline)
        time = predict_time(costs, pipeline)
        if memory.total > self.capacity and self.efficiency.limit_seconds:
            time = replace(time, overhead=time.overhead + turns(candidate) * self.efficiency.limit_seconds)
        return Prediction(
            candidate=candidate,
            num_gpus=candidate.layout.world_size,
            memory=memory,
            time=time,
            memory_capacity_bytes=self.capacity,
            model_flops_per_step=flops * candidate.global_batch_tokens,
            peak_flops_per_second=rates.peak,
        )
