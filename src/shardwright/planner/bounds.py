"""Lower bounds of time and memory of partial choices, by which the search prunes.

Each is a bound of `step.predict_time` or `memory.predict_memory` for every way to complete the
choice, not an estimate: tests compare the search with an exhaustive one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from operator import mul

from shardwright.planner.candidate import Candidate
from shardwright.planner.compute import update_seconds
from shardwright.planner.memory import StageLoad
from shardwright.planner.pipeline import PipelineShape, StageCut
from shardwright.planner.predict import Predictor
from shardwright.planner.step import LayerCosts, StepCosts, hide, owned_elements, rank_traffic
from shardwright.schedule.families import splits_backward


@dataclass(frozen=True)
class PipelineBound:
    """Bounds over some schedules: minimum `seconds` of their passes, the longest `forward` and
    `backward` pass of a rank for one micro-batch in seconds, and the minimum number of `layers`
    of each kind on a rank."""

    seconds: float
    forward: float
    backward: float
    layers: tuple[int, ...]
    most: tuple[int, ...]
    """Maximum number of layers of each kind on a rank."""


PipelineKey = tuple[StageCut, bool]
"""Partition of the layers, and True if backward passes are split."""


class PipelineBounds:
    """Time bounds of one pipeline, for any layer costs and number of micro-batches: layers of
    the ranks that differ, and of the stages before the last rank of each kind."""

    def __init__(self, pipeline: PipelineShape) -> None:
        self.split = pipeline.num_ranks > 1 and splits_backward(pipeline.schedule)
        partition = pipeline.cut
        self.loads = [(pipeline.load_of(rank), earlier_layers) for rank, earlier_layers in partition.furthest]
        self.least = partition.least
        self.most = partition.most
        self.key: PipelineKey = (partition, self.split)
        """Pipelines with the same key have the same bound for the same number of
        micro-batches."""

    def seconds(self, costs: LayerCosts, num_micro_batches: float, first_share: float = 1.0) -> float:
        """Return the minimum seconds of the passes.

        A rank runs all its micro-batches after the first one has passed the earlier stages, and
        the gradient of that or a later one must return through them. Meanwhile the rank may
        compute weight gradients if its schedule splits them off. `first_share` is the minimum
        share of a micro-batch's time that this wait takes.
        """
        best = 0.0
        wait_costs = costs.going if self.split else costs.both
        for load, earlier_layers in self.loads:
            rank_seconds = _through(costs.both, load.layers) + load.embedding * costs.embedding + load.head * costs.head
            best = max(best, num_micro_batches * rank_seconds + first_share * _through(wait_costs, earlier_layers))
        return best

    def bound(self, costs: LayerCosts, num_micro_batches: int) -> PipelineBound:
        """Return the minimum seconds with the longest passes of a rank."""
        forward = _through(costs.going, self.most)
        backward = _through(costs.both, self.most) - forward + costs.embedding + costs.head
        return PipelineBound(self.seconds(costs, num_micro_batches), forward + costs.embedding, backward, self.least, self.most)


def _through(seconds: tuple[float, ...], layers: tuple[int, ...]) -> float:
    return float(sum(map(mul, seconds, layers)))


def together(bounds: list[PipelineBound]) -> PipelineBound:
    """Merge the bounds of several schedules into one that holds for all of them."""
    return PipelineBound(
        min(bound.seconds for bound in bounds),
        max(bound.forward for bound in bounds),
        max(bound.backward for bound in bounds),
        tuple(map(min, zip(*(bound.layers for bound in bounds), strict=True))),
        tuple(map(max, zip(*(bound.most for bound in bounds), strict=True))),
    )


class DataBound:
    """Minimum seconds of exposed data-parallel traffic, of the update and of moving weights, on
    a rank with the fewest layers. Independent of micro-batch and recomputation."""

    def __init__(self, predictor: Predictor, candidate: Candidate, least: tuple[int, ...]) -> None:
        step = StepCosts(predictor.facts, candidate, predictor.rates(candidate.precision), predictor.network)
        is_single_stage = candidate.layout.pp == 1
        load = StageLoad(least, embedding=is_single_stage, head=is_single_stage)
        self._candidate = candidate
        self._network = predictor.network
        self._traffic = rank_traffic(step, load)
        self._forward, self._backward = (tuple(pair[direction] for pair in step.moving) for direction in (0, 1))
        self._moving = sum(map(mul, map(sum, step.moving), least))
        self._update = update_seconds(owned_elements(step, load), candidate, step.rates)

    def seconds(self, num_micro_batches: int, bound: PipelineBound) -> tuple[float, float]:
        """Return the seconds added to the passes, and the seconds after them, for passes of at
        most `bound`'s length.

        Traffic overlaps with the passes, which moving weights makes longer.
        """
        forward = bound.forward + _through(self._forward, bound.most)
        backward = bound.backward + _through(self._backward, bound.most)
        exposed, _ = hide(self._candidate, self._network, self._traffic, num_micro_batches, forward, backward)
        return num_micro_batches * self._moving, exposed + self._update


def overhead_of(predictor: Predictor, num_gpus: int) -> tuple[float, float]:
    """Return the overhead of every step: the straggler factor, and fixed seconds."""
    efficiency = predictor.efficiency
    cluster = predictor.cluster
    nodes = max(1.0, num_gpus / cluster.domain_size)
    return 1 + efficiency.straggler_share * log2(nodes), efficiency.step_seconds
