"""What an open choice carries through the search: the schedules it may end in, the bytes of its micro-batch, its bounds."""

from __future__ import annotations

from operator import mul
from typing import NamedTuple

from shardwright.planner.bounds import PipelineBound, PipelineBounds, PipelineKey
from shardwright.planner.memory import StageLoad
from shardwright.planner.space import Degrees, How
from shardwright.planner.step import LayerCosts


class Scheduled(NamedTuple):
    """A schedule by name and virtual stages: what bounds its time, and what it gives the first rank to hold."""

    bounds: PipelineBounds
    first: StageLoad
    name: str
    virtual_stages: int | None


class Kept(NamedTuple):
    """Bytes of a micro-batch: what one layer of each kind keeps of it, and what its backward pass makes beside that."""

    layers: tuple[float, ...]
    made: tuple[float, ...]

    def least(self, passes: tuple[float, ...]) -> float:
        """At the first layer of a backward pass, with so many passes through layers of each kind kept."""
        made = max((made for made, count in zip(self.made, passes, strict=True) if count), default=0.0)
        return float(sum(map(mul, passes, self.layers)) + made)


class Pipelines(NamedTuple):
    """All schedules for some stages and micro-batches, and what holds for each of them."""

    each: list[Scheduled]
    apart: list[PipelineBounds]
    """Without those that hold the same stages as one before and so have its bound."""
    first: StageLoad
    """What the first rank holds at least."""
    passes: tuple[float, ...]
    """Passes through layers of each kind that the first rank keeps at least."""


class ChosenHow(NamedTuple):
    """Choices 1 and 2, with what is known of them: costs and bytes of a micro-batch, the least that the first rank keeps, and the
    bound of each of `Pipelines.apart` by its key."""

    degrees: Degrees
    how: How
    pipelines: Pipelines
    costs: LayerCosts
    kept: Kept
    least_kept: float
    bounds: dict[PipelineKey, PipelineBound]


def with_least(each: list[Scheduled], *, alone: bool) -> Pipelines:
    """Schedules with the least that the first rank holds under any of them; `alone`: it is the last, too."""
    loads = [scheduled.first for scheduled in each]
    layers = tuple(map(min, zip(*(load.layers for load in loads), strict=True)))
    passes = tuple(map(min, zip(*([load.in_flight * n for n in load.layers] for load in loads), strict=True)))
    apart = list({scheduled.bounds.key: scheduled.bounds for scheduled in each}.values())
    return Pipelines(each, apart, StageLoad(layers, embedding=True, head=alone), passes)
