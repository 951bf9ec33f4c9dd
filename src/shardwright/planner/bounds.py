"""Seconds and bytes that a partial choice cannot go below: what lets the search leave out most of what it never looks at.
Torch-free.

Each is a bound of `step.predict_time` or `memory.predict_memory` for every way to complete the choice, not an estimate: tests
compare
the search with one that looks at everything.
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
    """Of schedules: `seconds` that their passes take at least, the longest forward and backward passes of a rank over one
    micro-batch,
    and layers of each kind that none of their ranks goes below."""

    seconds: float
    forward: float
    backward: float
    layers: tuple[int, ...]
    most: tuple[int, ...]
    """Layers of each kind that none of their ranks goes above."""


PipelineKey = tuple[StageCut, bool]
"""What is cut where, and whether backward passes are split."""


class PipelineBounds:
    """What is needed to bound one pipeline's time, worked out once for all costs and numbers of micro-batches: layers of the ranks
    that differ, and of the stages before the last of each kind."""

    def __init__(self, pipeline: PipelineShape) -> None:
        self.split = pipeline.num_ranks > 1 and splits_backward(pipeline.schedule)
        cut = pipeline.cut
        self.loads = [(pipeline.load_of(rank), before) for rank, before in cut.furthest]
        self.least, self.most = cut.least, cut.most
        self.key: PipelineKey = (cut, self.split)
        """Pipelines of one key take equally long at least, with as many micro-batches."""

    def seconds(self, costs: LayerCosts, num_micro_batches: float, first_share: float = 1.0) -> float:
        """A rank works through its micro-batches after the first has come down the stages before it. Then that one's, or a
        later one's, gradient has to go back up through them; beside that the rank may make gradients of weights, where its
        schedule splits them off. `first_share` is how much of a micro-batch's time that wait takes at least."""
        best = 0.0
        waiting = costs.going if self.split else costs.both
        for load, before in self.loads:
            mine = _through(costs.both, load.layers) + load.embedding * costs.embedding + load.head * costs.head
            best = max(best, num_micro_batches * mine + first_share * _through(waiting, before))
        return best

    def bound(self, costs: LayerCosts, num_micro_batches: int) -> PipelineBound:
        """Those seconds, and the longest passes of a rank."""
        going = _through(costs.going, self.most)
        backward = _through(costs.both, self.most) - going + costs.embedding + costs.head
        return PipelineBound(self.seconds(costs, num_micro_batches), going + costs.embedding, backward, self.least, self.most)


def _through(seconds: tuple[float, ...], layers: tuple[int, ...]) -> float:
    return float(sum(map(mul, seconds, layers)))


def together(bounds: list[PipelineBound]) -> PipelineBound:
    """What holds for each of several schedules."""
    return PipelineBound(
        min(bound.seconds for bound in bounds),
        max(bound.forward for bound in bounds),
        max(bound.backward for bound in bounds),
        tuple(map(min, zip(*(bound.layers for bound in bounds), strict=True))),
        tuple(map(max, zip(*(bound.most for bound in bounds), strict=True))),
    )


class DataBound:
    """Seconds of the data ranks' traffic that nothing hides, of the update, and of moving weights, on a rank that holds no more
    than the least. Neither micro batch nor recomputation changes what is worked out here."""

    def __init__(self, predictor: Predictor, candidate: Candidate, least: tuple[int, ...]) -> None:
        step = StepCosts(predictor.facts, candidate, predictor.rates(candidate.precision), predictor.network)
        alone = candidate.layout.pp == 1
        load = StageLoad(least, embedding=alone, head=alone)
        self._candidate, self._network = candidate, predictor.network
        self._traffic = rank_traffic(step, load)
        self._forward, self._backward = (tuple(pair[way] for pair in step.moving) for way in (0, 1))
        self._moving = sum(map(mul, map(sum, step.moving), least))
        self._update = update_seconds(owned_elements(step, load), candidate, step.rates)

    def seconds(self, num_micro_batches: int, bound: PipelineBound) -> tuple[float, float]:
        """Beside passes of at most that length: what comes to the passes, and what comes after them. Traffic hides behind passes,
        which moving weights makes longer."""
        forward = bound.forward + _through(self._forward, bound.most)
        backward = bound.backward + _through(self._backward, bound.most)
        exposed, _ = hide(self._candidate, self._network, self._traffic, num_micro_batches, forward, backward)
        return num_micro_batches * self._moving, exposed + self._update


def overhead_of(predictor: Predictor, num_gpus: int) -> tuple[float, float]:
    """What every step has on top: a factor for its stragglers, and seconds."""
    efficiency, cluster = predictor.efficiency, predictor.cluster
    nodes = max(1.0, num_gpus / cluster.domain_size)
    return 1 + efficiency.straggler_share * log2(nodes), efficiency.step_seconds
