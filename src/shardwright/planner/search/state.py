"""State of a partial choice in the search: possible schedules, bytes and bounds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import NamedTuple

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.stage_load import StageLoad
from shardwright.planner.prediction import MemoryParts
from shardwright.planner.predictor import Predictor
from shardwright.planner.search.bounds import (
    PipelineBoundModel,
    PipelineKey,
    PipelinesBoundModel,
)
from shardwright.planner.search.space import Degrees, ExecutionChoice, ShardingChoice
from shardwright.planner.time.data_parallel_time import RankTraffic
from shardwright.planner.time.step_costs import LayerCosts
from shardwright.planner.time.step_time import PlannedStep


class ScheduleOption(NamedTuple):
    """A schedule by name and virtual stages, with its time bounds and the first rank's layers
    and micro-batches in flight."""

    bounds: PipelineBoundModel
    first_rank_load: StageLoad
    name: str
    virtual_stages: int | None
    deferring_rank_load: StageLoad | None
    """Load of the last rank of a schedule that defers gradients of weights: it defers most."""


class RowActivations(NamedTuple):
    """Bytes of one row that one layer of each kind saves until its backward pass."""

    layer_bytes: tuple[float, ...]
    is_offloaded: bool

    def compute_min_bytes(self, num_passes: tuple[float, ...], num_rows: int) -> float:
        """Return a lower bound of the bytes while `num_passes` of so many rows through layers of
        each kind are saved, as when a loss is computed. Of offloaded layers one is on the device.

        A backward pass may add to them, but not always: it frees layers, or keeps less of them if
        gradients of weights are computed later.
        """
        saved = (
            max(map(mul, map(bool, num_passes), self.layer_bytes))
            if self.is_offloaded
            else sum(map(mul, num_passes, self.layer_bytes))
        )
        return float(num_rows * saved) * (1 - 1e-9)  # less by rounding errors


class DeferredActivations(NamedTuple):
    """Bytes of a micro-batch in one layer of each kind: saved until its backward pass, and then
    until the gradients of its weights are computed."""

    saved_bytes: tuple[float, ...]
    deferred_bytes: tuple[float, ...]

    def compute_min_bytes(self, load: StageLoad) -> float:
        """Return the bytes of the passes in memory besides the one that runs backward, at most,
        once all stages of the rank have gradients."""
        if load.passes:
            return max(
                (
                    sum(map(mul, load.count_layers(each.num_saved), self.saved_bytes))
                    + sum(map(mul, load.count_layers(each.num_deferred), self.deferred_bytes))
                    for each in load.passes
                    if each.kind != "F" and all(each.has_gradients)
                ),
                default=0.0,
            )
        saved = sum(map(mul, load.layers, self.saved_bytes))
        deferred = sum(map(mul, load.layers, self.deferred_bytes))
        return max(
            (
                moment.num_saved * saved + moment.num_deferred * deferred
                for moment in load.backward_moments
                if moment.gradient_share == 1.0
            ),
            default=0.0,
        )


class PipelineOptions(NamedTuple):
    """All schedules for a number of stages and micro-batches, and the bounds common to them."""

    options: list[ScheduleOption]
    bounds: PipelinesBoundModel
    first_rank_load: StageLoad
    """Minimum layers of the first rank over the schedules."""
    num_passes: tuple[float, ...]
    """Minimum number of passes through layers of each kind that the first rank saves."""


@dataclass
class PartialChoice:
    """Choices 1 and 2 with their consequences: costs and bytes of a micro-batch, the minimum
    activation bytes of the first rank, and the minimum seconds of the passes over all schedules."""

    degrees: Degrees
    execution: ExecutionChoice
    pipelines: PipelineOptions
    costs: LayerCosts
    activations: RowActivations
    min_activation_bytes: float
    min_seconds: float

    @cached_property
    def schedules(self) -> list[tuple[ScheduleOption, float, float]]:
        """The schedules with the minimum seconds of their passes, and the minimum activation bytes
        of the first rank."""
        found = []
        seconds: dict[PipelineKey, float] = {}
        for scheduled in self.pipelines.options:
            bounds = scheduled.bounds
            if bounds.key not in seconds:
                seconds[bounds.key] = bounds.compute_seconds(
                    self.costs, self.degrees.accumulation_steps
                )
            passes = scheduled.first_rank_load.count_saving_passes()
            num_bytes = self.activations.compute_min_bytes(passes, self.degrees.micro_batch_size)
            found.append((scheduled, seconds[bounds.key], num_bytes))
        return found


class CompleteChoice:
    """All choices, with the memory of ranks and the times of a step, each computed on first use and
    shared by the searches of one problem."""

    def __init__(
        self,
        predictor: Predictor,
        degrees: Degrees,
        sharding: ShardingChoice,
        candidate: Candidate,
        layer_costs: LayerCosts,
        traffic: RankTraffic,
    ) -> None:
        self.degrees = degrees
        self.sharding = sharding
        self.candidate = candidate
        self.pipeline = predictor.get_pipeline_stages(candidate)
        self.memory_of_rank: dict[int, MemoryParts] = {}
        """Those of `ChoiceCosts.get_memory`."""
        self._predictor = predictor
        self._layer_costs = layer_costs
        self._traffic = traffic

    @cached_property
    def step(self) -> PlannedStep:
        """Times of a step."""
        return self._predictor.build_step(self.candidate, self._layer_costs, self._traffic)


def build_pipeline_options(
    options: list[ScheduleOption], *, is_single_stage: bool
) -> PipelineOptions:
    """Combine schedules with the minimum load of the first rank. `is_single_stage`: the first rank
    is also the last."""
    loads = [scheduled.first_rank_load for scheduled in options]
    layers = tuple(map(min, zip(*(load.layers for load in loads), strict=True)))
    passes = tuple(
        map(
            min,
            zip(*(load.count_saving_passes() for load in loads), strict=True),
        )
    )
    return PipelineOptions(
        options,
        PipelinesBoundModel(scheduled.bounds for scheduled in options),
        StageLoad(layers, has_embedding=True, has_head=is_single_stage),
        passes,
    )
