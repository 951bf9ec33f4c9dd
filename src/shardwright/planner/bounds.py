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
from shardwright.planner.pipeline import PipelineShape, StageLayers
from shardwright.planner.predict import Predictor
from shardwright.planner.step import LayerCosts, StepCosts, data_seconds, owned_elements
from shardwright.schedule import FAMILIES


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
    first: StageLoad
    """What the first rank has to hold (of several schedules: of one of them)."""


class PipelineBounds:
    """What is needed to bound one pipeline's time, worked out once for all costs: layers of the first and the last rank, and of the
    stages before them."""

    def __init__(self, pipeline: PipelineShape) -> None:
        stages, ranks = pipeline.stages, pipeline.num_ranks
        self.num_micro_batches = pipeline.num_micro_batches
        self.split = ranks > 1 and (pipeline.schedule not in FAMILIES or FAMILIES[pipeline.schedule].splits_backward)
        self.loads = [(load, _sum(stages[: pipeline.stages_of(rank)[0]])) for rank, load in _ends(pipeline)]
        everything = pipeline.loads
        self.least = tuple(map(min, zip(*(load.layers for load in everything), strict=True)))
        self.most = tuple(map(max, zip(*(load.layers for load in everything), strict=True)))

    def bound(self, costs: LayerCosts) -> PipelineBound:
        """A rank works through its micro-batches after the first has come down the stages before it. Then that one's, or a
        later one's,
        gradient has to go back up through them; beside that the rank may make gradients of weights, where its schedule splits
        them off.
        """
        best = 0.0
        for load, before in self.loads:
            mine = _through(costs.both, load.layers) + load.embedding * costs.embedding + load.head * costs.head
            wait = _through(costs.going if self.split else costs.both, before)
            best = max(best, self.num_micro_batches * mine + wait)
        forward = _through(costs.going, self.most) + costs.embedding
        backward = _through(costs.both, self.most) - _through(costs.going, self.most) + costs.embedding + costs.head
        return PipelineBound(best, forward, backward, self.least, self.most, self.loads[0][0])


def _ends(pipeline: PipelineShape) -> list[tuple[int, StageLoad]]:
    return [(rank, pipeline.load_of(rank)) for rank in sorted({0, pipeline.num_ranks - 1})]


def _sum(stages: tuple[StageLayers, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*(stage.layers for stage in stages), strict=True))) if stages else ()


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
        bounds[0].first,
    )


def bound_data(predictor: Predictor, candidate: Candidate, costs: LayerCosts, bound: PipelineBound) -> float:
    """Seconds of data traffic that nothing hides, of the update, and of moving weights, on a rank that holds no more than the
    least."""
    step = StepCosts(predictor.facts, candidate, predictor.rates(candidate.precision), predictor.network, costs)
    alone = candidate.layout.pp == 1
    load = StageLoad(bound.layers, embedding=alone, head=alone)
    # Traffic hides behind passes, which moving weights makes longer.
    forward = bound.forward + sum(map(mul, (pair[0] for pair in step.moving), bound.most))
    backward = bound.backward + sum(map(mul, (pair[1] for pair in step.moving), bound.most))
    exposed, _ = data_seconds(step, load, forward, backward)
    moving = sum(map(mul, map(sum, step.moving), bound.layers))
    update = update_seconds(owned_elements(step, load), candidate, step.rates)
    return float(exposed + candidate.gradient_accumulation_steps * moving + update)


def with_overhead(predictor: Predictor, seconds: float, num_gpus: int) -> float:
    """A step's seconds with what every step has on top."""
    efficiency, cluster = predictor.efficiency, predictor.cluster
    nodes = max(1.0, num_gpus / cluster.domain_size)
    return seconds * (1 + efficiency.straggler_share * log2(nodes)) + efficiency.step_seconds
