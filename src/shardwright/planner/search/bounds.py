"""Lower bounds of time and memory of partial choices, by which the search prunes.

Each is a bound of `step_time.predict_time` or `memory.predict_memory` for every way to complete the
choice, not an estimate: tests compare the search with an exhaustive one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2
from operator import mul
from typing import NamedTuple

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.stage_load import StageLoad
from shardwright.planner.predictor import Predictor
from shardwright.planner.time.data_parallel_time import (
    compute_rank_traffic,
    count_updated_elements,
    overlap_traffic,
)
from shardwright.planner.time.pipeline import PipelinePartition, PipelineStages
from shardwright.planner.time.step_costs import LayerCosts, StepCosts
from shardwright.planner.time.update_time import compute_update_seconds
from shardwright.schedule.registry import has_split_backward


@dataclass(frozen=True)
class PipelineTimeBound:
    """Bounds over some schedules: minimum `compute_seconds` of their passes, the longest
    `forward_seconds` and `backward_seconds` pass of a rank for one micro-batch in seconds, and the
    minimum number of `min_layers` of each kind on a rank."""

    seconds: float
    forward_seconds: float
    backward_seconds: float
    min_layers: tuple[int, ...]
    max_layers: tuple[int, ...]
    """Maximum number of layers of each kind on a rank."""


class MinLayerCosts(NamedTuple):
    """Minima of some `LayerCosts`, by kind of layer where they have one value per kind."""

    forward_seconds: tuple[float, ...]
    pass_seconds: tuple[float, ...]
    embedding_seconds: float
    head_seconds: float


def merge_costs(costs: list[LayerCosts]) -> MinLayerCosts:
    """Return the minima of costs of the same micro-batch."""
    return MinLayerCosts(
        tuple(map(min, zip(*(each.forward_seconds for each in costs), strict=True))),
        tuple(map(min, zip(*(each.pass_seconds for each in costs), strict=True))),
        min(each.embedding_seconds for each in costs),
        min(each.head_seconds for each in costs),
    )


PipelineKey = tuple[PipelinePartition, bool]
"""Partition of the layers, and True if backward passes are split."""


class PipelineBoundModel:
    """Time bounds of one pipeline, for any layer costs and number of micro-batches: layers of
    the ranks that differ, and of the stages before the last rank of each kind."""

    def __init__(self, pipeline: PipelineStages) -> None:
        self.has_split_backward = pipeline.num_ranks > 1 and has_split_backward(pipeline.schedule)
        partition = pipeline.partition
        self.loads = [
            (partition.build_load(rank, pipeline.passes_in_flight[rank]), earlier_layers)
            for rank, earlier_layers in partition.last_distinct_ranks
        ]
        self.min_layers = partition.min_layers
        self.max_layers = partition.max_layers
        self.key: PipelineKey = (partition, self.has_split_backward)
        """Pipelines with the same key have the same bound for the same number of
        micro-batches."""

    def compute_seconds(
        self, costs: LayerCosts | MinLayerCosts, num_micro_batches: float, first_share: float = 1.0
    ) -> float:
        """Return the minimum seconds of the passes.

        A rank runs all its micro-batches after the first one has passed the earlier stages, and
        the gradient of that or a later one must return through them. Meanwhile the rank may
        compute weight gradients if its schedule splits them off. `first_share` is the minimum
        share of a micro-batch's time that this wait takes.
        """
        best = 0.0
        wait_costs = costs.forward_seconds if self.has_split_backward else costs.pass_seconds
        for load, earlier_layers in self.loads:
            rank_seconds = (
                _sum_layer_seconds(costs.pass_seconds, load.layers)
                + load.has_embedding * costs.embedding_seconds
                + load.has_head * costs.head_seconds
            )
            best = max(
                best,
                num_micro_batches * rank_seconds
                + first_share * _sum_layer_seconds(wait_costs, earlier_layers),
            )
        return best

    def compute_bound(self, costs: LayerCosts, num_micro_batches: int) -> PipelineTimeBound:
        """Return the minimum seconds with the longest passes of a rank."""
        forward = _sum_layer_seconds(costs.forward_seconds, self.max_layers)
        backward = (
            _sum_layer_seconds(costs.pass_seconds, self.max_layers)
            - forward
            + costs.embedding_seconds
            + costs.head_seconds
        )
        return PipelineTimeBound(
            self.compute_seconds(costs, num_micro_batches),
            forward + costs.embedding_seconds,
            backward,
            self.min_layers,
            self.max_layers,
        )


def _sum_layer_seconds(seconds: tuple[float, ...], layers: tuple[int, ...]) -> float:
    return float(sum(map(mul, seconds, layers)))


def merge_bounds(bounds: list[PipelineTimeBound]) -> PipelineTimeBound:
    """Merge the bounds of several schedules into one that holds for all of them."""
    return PipelineTimeBound(
        min(bound.seconds for bound in bounds),
        max(bound.forward_seconds for bound in bounds),
        max(bound.backward_seconds for bound in bounds),
        tuple(map(min, zip(*(bound.min_layers for bound in bounds), strict=True))),
        tuple(map(max, zip(*(bound.max_layers for bound in bounds), strict=True))),
    )


class DataTrafficBound:
    """Minimum seconds of exposed data-parallel traffic, of the update and of moving weights, on
    a rank with the fewest layers. Independent of micro-batch and recomputation."""

    def __init__(
        self, predictor: Predictor, candidate: Candidate, min_layers: tuple[int, ...]
    ) -> None:
        if candidate.working_weights == "auto":  # depends on micro-batches and recomputation
            candidate = replace(candidate, working_weights=True)
        step = StepCosts(
            predictor.facts, candidate, predictor.get_rates(candidate.precision), predictor.network
        )
        is_single_stage = candidate.layout.pp == 1
        load = StageLoad(min_layers, has_embedding=is_single_stage, has_head=is_single_stage)
        self._candidate = candidate
        self._network = predictor.network
        self._traffic = compute_rank_traffic(step, load)
        if not is_single_stage:  # how much of it is exposed depends on the schedule
            self._traffic = replace(self._traffic, last_reduce_seconds=0.0)
        self._forward_weight_seconds, self._backward_weight_seconds = (
            tuple(pair[direction] for pair in step.weight_seconds) for direction in (0, 1)
        )
        # Waits for offloaded tensors depend on the micro-batch; all traffic may overlap with them.
        has_waits = not candidate.activation_offload == candidate.parameter_offload == "none"
        self._wait_seconds = float("inf") if has_waits else 0.0
        self._weight_seconds = sum(map(mul, map(sum, step.weight_seconds), min_layers))
        # The device need not take the time of an update that runs on the host, or whose moments
        # pass from the host through it during other passes.
        is_hidden = candidate.overlaps_update and candidate.optimizer_tier == "host"
        self._update_seconds = (
            0.0
            if is_hidden or candidate.is_updated_on_host
            else compute_update_seconds(count_updated_elements(step, load), candidate, step.rates)
        )

    def compute_seconds(
        self, num_micro_batches: int, bound: PipelineTimeBound
    ) -> tuple[float, float]:
        """Return the seconds added to the passes, and the seconds after them, for passes of at
        most `compute_bound`'s length.

        Traffic overlaps with the passes, which moving weights makes longer.
        """
        forward = (
            self._wait_seconds
            + bound.forward_seconds
            + _sum_layer_seconds(self._forward_weight_seconds, bound.max_layers)
        )
        backward = (
            self._wait_seconds
            + bound.backward_seconds
            + _sum_layer_seconds(self._backward_weight_seconds, bound.max_layers)
        )
        exposed, _ = overlap_traffic(
            self._candidate, self._network, self._traffic, num_micro_batches, forward, backward
        )
        return num_micro_batches * self._weight_seconds, exposed + self._update_seconds


def compute_overhead(predictor: Predictor, num_gpus: int) -> tuple[float, float]:
    """Return the overhead of every step: the straggler factor, and fixed seconds."""
    efficiency = predictor.efficiency
    cluster = predictor.cluster
    nodes = max(1.0, num_gpus / cluster.domain_size)
    return 1 + efficiency.straggler_share * log2(nodes), efficiency.step_seconds
