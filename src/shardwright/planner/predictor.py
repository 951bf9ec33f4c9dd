"""Prediction of the memory and time of one candidate on one cluster."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from shardwright.architecture import ModelShape
from shardwright.config.low_precision import LowPrecisionRecipe
from shardwright.hardware import Cluster
from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.parameter_memory import PersistentMemory
from shardwright.planner.memory.peaks import predict_memory
from shardwright.planner.memory.stage_load import StageLoad
from shardwright.planner.model_costs import ModelFacts, get_model_facts
from shardwright.planner.prediction import MemoryParts, Prediction
from shardwright.planner.rates.calibration import load_efficiencies
from shardwright.planner.rates.device_rates import DeviceRates
from shardwright.planner.rates.efficiency import Efficiency
from shardwright.planner.time.communication import NetworkModel
from shardwright.planner.time.data_parallel_time import RankTraffic
from shardwright.planner.time.pipeline import PipelineStages, get_pipeline
from shardwright.planner.time.pipeline_simulation import simulate_pipeline
from shardwright.planner.time.step_costs import LayerCompute, LayerCosts, StepCosts
from shardwright.planner.time.step_time import PlannedStep, Simulation
from shardwright.planner.uncertainty import load_error_spreads


def predict(
    shape: ModelShape,
    candidate: Candidate,
    cluster: Cluster,
    efficiency: Efficiency,
    trainer: str = "shardwright",
) -> Prediction:
    """Predict memory and time of one optimizer step of `candidate` on `cluster`.

    The candidate's layout must divide the model and the batch (see
    `planner.search.divisibility`). Its world size may be smaller than the cluster; it then uses the
    first ranks.

    Args:
        trainer: framework whose measured rows determine the intervals.

    Raises:
        InputError: the accelerator has no units for the precision, or the schedule does not
            support the number of micro-batches.
    """
    return Predictor(get_model_facts(shape), cluster, efficiency, trainer).predict(candidate)


def build_predictor(facts: ModelFacts, cluster: Cluster) -> Predictor:
    """Build the predictor of a model on a cluster, with the fitted efficiency of its devices."""
    return Predictor(facts, cluster, load_efficiencies().get_efficiency(cluster.accelerator))


def predict_rank_memory(facts: ModelFacts, candidate: Candidate) -> list[MemoryParts]:
    """Predict the bytes of each rank that differs; they do not depend on the cluster."""
    facts = _get_facts(facts, candidate)
    pipeline = get_pipeline(
        facts,
        candidate.layout,
        candidate.gradient_accumulation_steps,
        candidate.sequence_length,
        candidate.engine,
        has_adapters=candidate.adapter is not None,
    )
    return [
        predict_memory(facts, candidate, load, Efficiency()) for load in pipeline.distinct_loads
    ]


def remove_kernels(candidate: Candidate) -> Candidate:
    """Return the candidate without the kernels that CPUs lack: of norms, of products that write
    fp32, and of products of quantised operands."""
    shares = candidate.scaled_shares
    return replace(
        candidate,
        has_fused_norms=False,
        has_wide_products=False,
        scaled_shares=None if shares is None else replace(shares, has_kernels=False),
    )


def _get_facts(facts: ModelFacts, candidate: Candidate) -> ModelFacts:
    """Return the facts of the model's layers as the candidate recomputes them."""
    if candidate.recompute != "mixed":
        return facts
    return get_model_facts(facts.shape, candidate.saved_results, facts.frozen_names)


class Predictor:
    """Predictor of many candidates of one model on one cluster. Caches rates and
    collectives."""

    def __init__(
        self,
        facts: ModelFacts,
        cluster: Cluster,
        efficiency: Efficiency,
        trainer: str = "shardwright",
    ) -> None:
        self.facts = facts
        self.cluster = cluster
        self.efficiency = efficiency
        self._trainer = trainer
        self.uncertainty = load_error_spreads().get_uncertainty(
            cluster.accelerator,
            trainer,
            is_sparse=facts.shape.experts is not None,
            is_measured=cluster.profile is not None,
        )
        self.network = NetworkModel(cluster, efficiency)
        self._rates: dict[tuple[str, LowPrecisionRecipe | None], DeviceRates] = {}

    def resize(self, cluster: Cluster) -> Predictor:
        """Return the predictor of the same model on another number of the same devices."""
        return Predictor(self.facts, cluster, self.efficiency, self._trainer)

    def get_rates(self, candidate: Candidate) -> DeviceRates:
        """Return the cached rates of the device in the candidate's precision."""
        shares = candidate.quantised_shares
        key = (candidate.precision, None if shares is None else shares.recipe)
        rates = self._rates.get(key)
        if rates is None:
            rates = self._rates[key] = DeviceRates(self.cluster, self.efficiency, *key)
        return rates

    @cached_property
    def capacity_bytes(self) -> float:
        """Bytes of one device that a run may plan to fill."""
        profile = self.cluster.profile
        return (
            self.cluster.accelerator.memory_bytes if profile is None else profile.memory_bytes
        ) * self.efficiency.usable_share

    def compute_layer_costs(
        self, candidate: Candidate, compute: LayerCompute | None = None
    ) -> LayerCosts:
        """Compute the layer costs of one micro-batch of the candidate. `compute` may have computed
        a part of them."""
        facts = _get_facts(self.facts, candidate)
        rates = self.get_rates(candidate)
        return LayerCosts(facts, candidate, rates, self.network, compute)

    def get_pipeline_stages(self, candidate: Candidate) -> PipelineStages:
        """Return the stages of the candidate and their schedule."""
        steps = candidate.gradient_accumulation_steps
        return get_pipeline(
            _get_facts(self.facts, candidate),
            candidate.layout,
            steps,
            candidate.sequence_length,
            candidate.engine,
            has_adapters=candidate.adapter is not None,
        )

    def compute_memory(self, candidate: Candidate, pipeline: PipelineStages) -> MemoryParts:
        """Compute the memory of the rank that needs the most."""
        loads = (self.compute_rank_memory(candidate, load) for load in pipeline.distinct_loads)
        return max(loads, key=lambda parts: parts.total)

    def compute_rank_memory(
        self, candidate: Candidate, load: StageLoad, persistent: PersistentMemory | None = None
    ) -> MemoryParts:
        """Compute the memory of a rank with this load. Pass `persistent` if it is already known."""
        if self.cluster.accelerator.kind == "cpu":
            candidate = remove_kernels(candidate)
        facts = _get_facts(self.facts, candidate)
        return predict_memory(facts, candidate, load, self.efficiency, persistent)

    def build_step(
        self,
        candidate: Candidate,
        layer_costs: LayerCosts | None = None,
        traffic: RankTraffic | None = None,
    ) -> PlannedStep:
        """Build the times of the candidate's step. Pass `compute_layer_costs` and the traffic of
        ranks if they are already known."""
        costs = StepCosts(
            _get_facts(self.facts, candidate),
            candidate,
            self.get_rates(candidate),
            self.network,
            layer_costs,
        )
        return PlannedStep(costs, self.get_pipeline_stages(candidate), traffic)

    def predict(
        self,
        candidate: Candidate,
        memory: MemoryParts | None = None,
        step: PlannedStep | None = None,
        simulation: Simulation = simulate_pipeline,
    ) -> Prediction:
        """Predict memory and time. Pass `compute_memory` and `build_step` if they are already
        known."""
        step = step or self.build_step(candidate)
        rates = step.costs.rates
        tokens = min(
            candidate.sequence_length, candidate.document_tokens or candidate.sequence_length
        )
        flops = self.facts.compute_flops_per_token(tokens, is_frozen=candidate.adapter is not None)
        memory = memory or self.compute_memory(candidate, step.pipeline)
        time = step.predict(simulation)
        return Prediction(
            candidate=candidate,
            num_gpus=candidate.layout.world_size,
            memory=memory,
            time=time,
            memory_capacity_bytes=self.capacity_bytes,
            model_flops_per_step=flops * candidate.global_batch_tokens,
            peak_flops_per_second=rates.peak_flops_per_second,
            uncertainty=self.uncertainty,
        )
