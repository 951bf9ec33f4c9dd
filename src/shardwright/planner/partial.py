"""State of a partial choice in the search: possible schedules, bytes and bounds."""

from __future__ import annotations

from operator import mul
from typing import NamedTuple

from shardwright.planner.bounds import PipelineBound, PipelineBounds, PipelineKey
from shardwright.planner.memory import StageLoad
from shardwright.planner.space import Degrees, How
from shardwright.planner.step import LayerCosts


class Scheduled(NamedTuple):
    """A schedule by name and virtual stages, with its time bounds and the first rank's layers
    and micro-batches in flight."""

    bounds: PipelineBounds
    first: StageLoad
    name: str
    virtual_stages: int | None


class Kept(NamedTuple):
    """Bytes of a micro-batch: saved by one layer of each kind, and allocated by its backward
    pass in addition."""

    layers: tuple[float, ...]
    made: tuple[float, ...]

    def least(self, passes: tuple[float, ...]) -> float:
        """Return the bytes at the first layer of a backward pass while `passes` through layers
        of each kind are saved."""
        backward_bytes = max(
            (backward_bytes for backward_bytes, count in zip(self.made, passes, strict=True) if count), default=0.0
        )
        return float(sum(map(mul, passes, self.layers)) + backward_bytes)


class Pipelines(NamedTuple):
    """All schedules for a number of stages and micro-batches, and the bounds common to them."""

    each: list[Scheduled]
    apart: list[PipelineBounds]
    """Bounds without those of the same stages as an earlier schedule, which are equal."""
    first: StageLoad
    """Minimum layers of the first rank over the schedules."""
    passes: tuple[float, ...]
    """Minimum number of passes through layers of each kind that the first rank saves."""


class ChosenHow(NamedTuple):
    """Choices 1 and 2 with their consequences: costs and bytes of a micro-batch, the minimum
    activation bytes of the first rank, and the bound of each of `Pipelines.apart` by its
    key."""

    degrees: Degrees
    how: How
    pipelines: Pipelines
    costs: LayerCosts
    kept: Kept
    least_kept: float
    bounds: dict[PipelineKey, PipelineBound]


def with_least(each: list[Scheduled], *, alone: bool) -> Pipelines:
    """Combine schedules with the minimum load of the first rank. `alone`: the first rank is
    also the last."""
    loads = [scheduled.first for scheduled in each]
    layers = tuple(map(min, zip(*(load.layers for load in loads), strict=True)))
    passes = tuple(map(min, zip(*([load.in_flight * n for n in load.layers] for load in loads), strict=True)))
    distinct = list({scheduled.bounds.key: scheduled.bounds for scheduled in each}.values())
    return Pipelines(each, distinct, StageLoad(layers, embedding=True, head=alone), passes)
