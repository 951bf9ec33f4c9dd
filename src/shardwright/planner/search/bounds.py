"""Lower bounds of time and memory of partial choices, by which the search prunes.

Each is a bound of `step_time.PlannedStep` or `memory.predict_memory` for every way to complete the
choice, not an estimate: tests compare the search with an exhaustive one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf, log2
from operator import le, mul
from typing import NamedTuple, TypeVar

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.stage_load import StageLoad
from shardwright.planner.predictor import Predictor
from shardwright.planner.rates.efficiency import Efficiency
from shardwright.planner.search.space import Degrees
from shardwright.planner.time.data_parallel_time import (
    compute_rank_traffic,
    count_updated_elements,
    overlap_traffic,
)
from shardwright.planner.time.pipeline import PipelinePartition, PipelineStages
from shardwright.planner.time.step_costs import LayerCosts, StepCosts
from shardwright.planner.time.update_time import compute_update_seconds
from shardwright.schedule.registry import has_split_backward

T = TypeVar("T")


class LongestPasses(NamedTuple):
    """Longest forward and backward pass of a rank for one micro-batch, in seconds, over some
    schedules, and the maximum number of `max_layers` of each kind on a rank."""

    forward_seconds: float
    backward_seconds: float
    max_layers: tuple[int, ...]


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


def build_pipeline_key(pipeline: PipelineStages) -> PipelineKey:
    """Return the key of a pipeline's bound: equal keys have the same bound for the same number of
    micro-batches."""
    is_split = pipeline.num_ranks > 1 and has_split_backward(pipeline.schedule)
    return pipeline.partition, is_split


class RankWork(NamedTuple):
    """Layers of each kind on a rank, 1 if it has the embedding and the head, and the layers of the
    stages before it."""

    layers: tuple[int, ...]
    num_embeddings: int
    num_heads: int
    earlier_layers: tuple[int, ...]

    def is_within(self, other: RankWork) -> bool:
        """Return True if it takes at most as long as `other`, whatever the costs."""
        return (
            all(map(le, self.layers, other.layers))
            and self.num_embeddings <= other.num_embeddings
            and self.num_heads <= other.num_heads
            and all(map(le, self.earlier_layers, other.earlier_layers))
        )


class PipelineBoundModel:
    """Time bound of one pipeline, for any layer costs and number of micro-batches, from the work of
    the ranks that differ."""

    def __init__(self, pipeline: PipelineStages) -> None:
        self.key = build_pipeline_key(pipeline)
        self.has_split_backward = self.key[1]
        partition = pipeline.partition
        loads = [(partition.build_load(rank, 1.0), e) for rank, e in partition.last_distinct_ranks]
        self.ranks = _select_minimal(
            [
                RankWork(
                    load.layers,
                    int(load.has_embedding),
                    int(load.has_head),
                    earlier_layers or (0,) * len(load.layers),
                )
                for load, earlier_layers in loads
            ],
            lambda work, other: other.is_within(work),
        )
        self.min_layers = partition.min_layers
        self.max_layers = partition.max_layers

    def is_within(self, other: PipelineBoundModel) -> bool:
        """Return True if its bound is at most `other`'s, whatever the costs of layers. Rounding
        does not change that: larger terms never have a smaller rounded sum."""
        return self.has_split_backward >= other.has_split_backward and all(
            any(work.is_within(larger) for larger in other.ranks) for work in self.ranks
        )

    def compute_seconds(
        self,
        costs: LayerCosts | MinLayerCosts,
        num_micro_batches: float,
        first_share: float = 1.0,
        limit: float = inf,
    ) -> float:
        """Return the minimum seconds of the passes; any number from `limit` on if they take that
        long.

        A rank runs all its micro-batches after the first one has passed the earlier stages, and
        the gradient of that or a later one must return through them. Meanwhile the rank may
        compute weight gradients if its schedule splits them off. `first_share` is the minimum
        share of a micro-batch's time that this wait takes.
        """
        best = 0.0
        pass_costs = costs.pass_seconds
        wait_costs = costs.forward_seconds if self.has_split_backward else pass_costs
        for layers, num_embeddings, num_heads, earlier_layers in self.ranks:
            rank_seconds = (
                sum(map(mul, pass_costs, layers))
                + num_embeddings * costs.embedding_seconds
                + num_heads * costs.head_seconds
            )
            seconds = num_micro_batches * rank_seconds + first_share * sum(
                map(mul, wait_costs, earlier_layers)
            )
            if seconds > best:
                best = seconds
                if best >= limit:
                    break
        return best


class PipelinesBoundModel:
    """Bounds that hold for several pipelines."""

    def __init__(self, pipelines: Iterable[PipelineBoundModel]) -> None:
        self.pipelines = list({pipeline.key: pipeline for pipeline in pipelines}.values())
        self.lowest = _select_minimal(self.pipelines, PipelineBoundModel.is_within)
        """Those of which one has the lowest bound, whatever the costs."""
        self._max_layers = tuple(dict.fromkeys(each.max_layers for each in self.pipelines))
        self.min_layers = tuple(
            map(min, zip(*(each.min_layers for each in self.pipelines), strict=True))
        )
        """Minimum number of layers of each kind on a rank."""

    def compute_seconds(
        self, costs: LayerCosts | MinLayerCosts, num_micro_batches: float, first_share: float = 1.0
    ) -> float:
        """Return the minimum seconds of the passes (`PipelineBoundModel.compute_seconds`); infinity
        without pipelines."""
        best = inf
        for pipeline in self.lowest:
            best = min(best, pipeline.compute_seconds(costs, num_micro_batches, first_share, best))
        return best

    def compute_longest_passes(self, costs: LayerCosts) -> LongestPasses:
        """Return the longest passes of a rank."""
        forward_seconds = backward_seconds = 0.0
        for layers in self._max_layers:
            forward = _sum_layer_seconds(costs.forward_seconds, layers)
            backward = (
                _sum_layer_seconds(costs.pass_seconds, layers)
                - forward
                + costs.embedding_seconds
                + costs.head_seconds
            )
            forward_seconds = max(forward_seconds, forward + costs.embedding_seconds)
            backward_seconds = max(backward_seconds, backward)
        return LongestPasses(
            forward_seconds,
            backward_seconds,
            tuple(map(max, zip(*self._max_layers, strict=True))),
        )


def _select_minimal(items: Iterable[T], is_within: Callable[[T, T], bool]) -> list[T]:
    """Drop the items within which another one is; of equal ones, all but the first."""
    selected: list[T] = []
    for item in items:
        if not any(is_within(other, item) for other in selected):
            selected = [other for other in selected if not is_within(item, other)]
            selected.append(item)
    return selected


def _sum_layer_seconds(seconds: tuple[float, ...], layers: tuple[int, ...]) -> float:
    return float(sum(map(mul, seconds, layers)))


class DataTrafficBound:
    """Minimum seconds of exposed data-parallel traffic, of the update and of moving weights, on
    a rank with the fewest layers. Independent of micro-batch and recomputation."""

    def __init__(
        self, predictor: Predictor, candidate: Candidate, min_layers: tuple[int, ...]
    ) -> None:
        if candidate.working_weights == "auto":  # depends on micro-batches and recomputation
            candidate = replace(candidate, working_weights=True)
        step = StepCosts(
            predictor.facts, candidate, predictor.get_rates(candidate), predictor.network
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
        self, num_micro_batches: int, longest: LongestPasses
    ) -> tuple[float, float]:
        """Return the seconds added to the passes, and the seconds after them, for passes of at
        most this length.

        Traffic overlaps with the passes, which moving weights makes longer.
        """
        forward = (
            self._wait_seconds
            + longest.forward_seconds
            + _sum_layer_seconds(self._forward_weight_seconds, longest.max_layers)
        )
        backward = (
            self._wait_seconds
            + longest.backward_seconds
            + _sum_layer_seconds(self._backward_weight_seconds, longest.max_layers)
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


class MinReserve:
    """Minimum bytes of the allocator and the driver next to live tensors."""

    def __init__(self, efficiency: Efficiency) -> None:
        self._factor = 1 + efficiency.reserve_share
        self._fixed_bytes = [
            efficiency.reserve_bytes
            + efficiency.context_bytes
            + efficiency.communicator_bytes * num_groups
            for num_groups in range(6)
        ]
        """By number of axes with more than one rank: pp, tp, cp, ep and data ranks."""

    def add_to(self, degrees: Degrees, live_bytes: float) -> float:
        """Return `live_bytes` with the reserve."""
        num_groups = degrees.num_parallel_axes + (degrees.data_ranks > 1)
        return live_bytes * self._factor + self._fixed_bytes[num_groups]
