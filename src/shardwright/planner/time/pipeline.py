"""Pipeline of a candidate: layers per stage and micro-batches in flight.

Follows the schedule that will run (`shardwright.schedule`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from shardwright.layout import Layout
from shardwright.planner.engine_model import SHARDWRIGHT_ENGINE, EngineModel
from shardwright.planner.memory.stage_load import (
    BackwardMoment,
    RankPass,
    RankStage,
    StageLoad,
)
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.time.rank_passes import list_rank_moments, list_rank_passes
from shardwright.schedule import Action, Schedule, count_peak_activations, load_schedule
from shardwright.schedule.registry import (
    PIPELINE_SCHEDULES,
    assign_stages,
    build_schedule_row,
    count_stages_per_rank,
    has_split_backward,
)


@dataclass(frozen=True)
class StageLayers:
    """Layers of each kind in a stage, its rank, and whether it has the embedding and the
    head."""

    layers: tuple[int, ...]
    has_embedding: bool
    has_head: bool
    rank: int


@dataclass(frozen=True, eq=False)
class PipelinePartition:
    """Partition of the layers into stages, and its per-rank sums, for any number of
    micro-batches."""

    stages: tuple[StageLayers, ...]
    num_ranks: int

    @cached_property
    def stage_kinds(self) -> tuple[tuple[tuple[int, ...], bool, bool], ...]:
        """Distinct stages as (layers, embedding, head), in order of first occurrence."""
        return tuple(
            dict.fromkeys(
                (stage.layers, stage.has_embedding, stage.has_head) for stage in self.stages
            )
        )

    @cached_property
    def kind_of_stage(self) -> tuple[int, ...]:
        """Index into `stage_kinds` of each stage."""
        return tuple(
            self.stage_kinds.index((stage.layers, stage.has_embedding, stage.has_head))
            for stage in self.stages
        )

    @cached_property
    def distinct_ranks(self) -> tuple[int, ...]:
        """First rank of each set of ranks with the same kinds of stages."""
        first: dict[tuple[int, ...], int] = {}
        for rank, stages in enumerate(self.stages_per_rank):
            first.setdefault(tuple(self.kind_of_stage[stage] for stage in stages), rank)
        return tuple(first.values())

    @cached_property
    def stages_per_rank(self) -> tuple[tuple[int, ...], ...]:
        """Stages of each rank."""
        return tuple(
            tuple(i for i, stage in enumerate(self.stages) if stage.rank == rank)
            for rank in range(self.num_ranks)
        )

    @cached_property
    def layers_of_stage(self) -> tuple[range, ...]:
        """Layers of the model in each stage."""
        ends = list(accumulate((sum(stage.layers) for stage in self.stages), initial=0))
        return tuple(map(range, ends, ends[1:]))

    @cached_property
    def layers_per_rank(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each kind on each rank."""
        return tuple(
            _sum_layers([self.stages[index] for index in stages]) for stages in self.stages_per_rank
        )

    @cached_property
    def min_layers(self) -> tuple[int, ...]:
        """Minimum number of layers of each kind on a rank."""
        return tuple(map(min, zip(*self.layers_per_rank, strict=True)))

    @cached_property
    def max_layers(self) -> tuple[int, ...]:
        """Maximum number of layers of each kind on a rank."""
        return tuple(map(max, zip(*self.layers_per_rank, strict=True)))

    @cached_property
    def last_distinct_ranks(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Last rank of each set of ranks with equal stages, with the layers that a micro-batch
        passes before reaching it."""
        last: dict[tuple[object, ...], int] = {}
        for rank, stages in enumerate(self.stages_per_rank):
            rank_stages = [self.stages[index] for index in stages]
            last[
                self.layers_per_rank[rank],
                any(stage.has_embedding for stage in rank_stages),
                any(stage.has_head for stage in rank_stages),
            ] = rank
        return tuple(
            (rank, _sum_layers(self.stages[: self.stages_per_rank[rank][0]]))
            for rank in last.values()
        )

    def build_load(
        self,
        rank: int,
        num_in_flight: float,
        backward_moments: tuple[BackwardMoment, ...] = (),
        passes: tuple[RankPass, ...] = (),
    ) -> StageLoad:
        """Build the load of a rank."""
        rank_stages = [self.stages[index] for index in self.stages_per_rank[rank]]
        return StageLoad(
            layers=self.layers_per_rank[rank],
            has_embedding=any(stage.has_embedding for stage in rank_stages),
            has_head=any(stage.has_head for stage in rank_stages),
            num_in_flight=num_in_flight,
            num_stages=len(rank_stages),
            num_gradient_senders=sum(
                index > 0 and self.stages[index - 1].rank != rank
                for index in self.stages_per_rank[rank]
            ),
            backward_moments=backward_moments,
            stages=tuple(
                RankStage(self.layers_of_stage[stage], self.stages[stage].layers)
                for stage in self.stages_per_rank[rank]
                if passes
            ),
            passes=passes,
        )


def _sum_layers(stages: Sequence[StageLayers]) -> tuple[int, ...]:
    """Sum the layers of each kind."""
    return tuple(map(sum, zip(*(stage.layers for stage in stages), strict=True)))


@dataclass(frozen=True)
class PipelineStages:
    """Stages of a candidate and the schedule that orders their passes."""

    schedule: str
    num_ranks: int
    num_micro_batches: int
    virtual_stages: int | None
    partition: PipelinePartition
    has_frozen: bool = False
    """True if parameters are frozen, so that stages of a rank may differ in what they save."""
    has_ordered_frees: bool = True
    """As `EngineModel.has_ordered_frees`."""

    @property
    def stages(self) -> tuple[StageLayers, ...]:
        """Stages in the order in which a micro-batch passes them."""
        return self.partition.stages

    def list_rank_stages(self, rank: int) -> tuple[int, ...]:
        return self.partition.stages_per_rank[rank]

    @cached_property
    def passes_in_flight(self) -> tuple[float, ...]:
        """Peak number of saved passes per rank, in passes through all of its layers."""
        if self.num_ranks == 1:
            return (1.0,)
        peaks = count_passes_in_flight(
            self.schedule, self.num_ranks, self.num_micro_batches, self.virtual_stages
        )
        per_rank = len(self.stages) / self.num_ranks
        return tuple(peak / per_rank for peak in peaks)

    @property
    def _follows_passes(self) -> bool:
        """True if memory follows each pass of a rank: its stages differ, or it has one, whose
        messages and gradients are exactly known. 1F1B has its peak in its first backward pass."""
        has_one_stage = len(self.stages) == self.num_ranks and self.schedule != "1f1b"
        return self.has_frozen or (has_one_stage and self.has_ordered_frees)

    def build_rank_load(self, rank: int) -> StageLoad:
        """Build the load of a rank."""
        row = (self.schedule, self.num_ranks, self.num_micro_batches, self.virtual_stages, rank)
        is_split = self.num_ranks > 1 and has_split_backward(self.schedule)
        return self.partition.build_load(
            rank,
            self.passes_in_flight[rank],
            list_backward_moments(*row) if is_split else (),
            _list_passes(*row) if self.num_ranks > 1 and self._follows_passes else (),
        )

    def build_first_load(self) -> StageLoad:
        """Build the load of the first rank; without the moments of schedules that defer gradients
        of weights, unless its passes are followed."""
        if self._follows_passes:
            return self.build_rank_load(0)
        return self.partition.build_load(0, self.passes_in_flight[0])

    @cached_property
    def fullest_ranks(self) -> tuple[int, ...]:
        """First ranks with the most in memory: among ranks that differ only in micro-batches in
        flight, the one with most, and the one with most that wait for gradients of weights."""
        fullest: dict[tuple[object, ...], tuple[tuple[float, float], int]] = {}
        is_deferring = self.num_ranks > 1 and has_split_backward(self.schedule)
        num_micro_batches = _limit_micro_batches(
            self.schedule, self.num_ranks, self.num_micro_batches
        )
        for rank in range(self.num_ranks):
            load = self.partition.build_load(rank, self.passes_in_flight[rank])
            num_waiting = is_deferring and count_deferred_passes(
                self.schedule, self.num_ranks, num_micro_batches, self.virtual_stages, rank
            )
            for measure in ((load.num_in_flight, 0.0), (num_waiting, load.num_in_flight)):
                key = (load.layers, load.has_embedding, load.has_head, measure[1] != 0.0)
                if key not in fullest or fullest[key][0] < measure:
                    fullest[key] = (measure, rank)
        return tuple(dict.fromkeys(rank for _, rank in fullest.values()))

    @cached_property
    def distinct_loads(self) -> tuple[StageLoad, ...]:
        """Loads of `fullest_ranks` that differ."""
        return tuple(dict.fromkeys(map(self.build_rank_load, self.fullest_ranks)))


def count_passes_in_flight(
    name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int | None = None
) -> tuple[int, ...]:
    """Return, per rank, the peak number of passes through one stage whose activations are
    saved.

    Common schedules have formulas: a search needs hundreds of schedules with thousands of actions
    each. `schedule.count_peak_activations` counts on the schedule itself; a test compares both.

    >>> count_passes_in_flight("1f1b", 4, 8), count_passes_in_flight("zbv", 2, 6)
    ((4, 3, 2, 1), (4, 4))
    """
    ranks = range(num_ranks)
    if name == "gpipe":
        return (num_micro_batches,) * num_ranks
    if name == "1f1b":
        return tuple(min(num_ranks - rank, num_micro_batches) for rank in ranks)
    if name == "zb_h1":
        return tuple(_count_zb_h1_passes(rank, num_ranks, num_micro_batches) for rank in ranks)
    if name == "interleaved_1f1b":
        virtual = count_stages_per_rank(name, virtual_stages)
        warmups = ((virtual - 1) * num_ranks + 2 * (num_ranks - 1 - rank) for rank in ranks)
        return tuple(min(warmup + 1, virtual * num_micro_batches) for warmup in warmups)
    if name == "zbv" and num_micro_batches >= 2 * num_ranks:
        return (2 * num_ranks,) * num_ranks
    if name == "dualpipev":
        return (2 * num_ranks + 1,) * num_ranks
    return _count_scheduled_passes(name, num_ranks, num_micro_batches, virtual_stages)


_MAX_STEADY_ROUNDS = 3
"""Micro-batches per rank after which every named schedule repeats itself."""


def list_backward_moments(
    name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int | None, rank: int
) -> tuple[BackwardMoment, ...]:
    """Return the backward passes of a rank during which most is in memory. No other pass of the
    same kind, with as many layers that stay, has at least as much of everything.

    >>> [moment.num_saved for moment in list_backward_moments("zb_h1", 2, 8, None, 0)]
    [0.0, 1.0]
    >>> [moment.num_deferred for moment in list_backward_moments("zb_h1", 2, 8, None, 1)]
    [1.0]
    """
    num_micro_batches = _limit_micro_batches(name, num_ranks, num_micro_batches)
    return _list_schedule_moments(name, num_ranks, num_micro_batches, virtual_stages, rank)


def _limit_micro_batches(name: str, num_ranks: int, num_micro_batches: int) -> int:
    if name not in PIPELINE_SCHEDULES:
        return num_micro_batches
    return min(num_micro_batches, _MAX_STEADY_ROUNDS * num_ranks)


@lru_cache(maxsize=8192)
def count_deferred_passes(
    name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int | None, rank: int
) -> int:
    """Return the most passes through one stage that wait for gradients of weights during a
    backward pass of a rank.

    >>> [count_deferred_passes("zb_h1", 4, 8, None, rank) for rank in range(4)]
    [0, 1, 2, 3]
    """
    num_deferred = most = 0
    for kind, _, _ in _load_row(name, num_ranks, num_micro_batches, virtual_stages, rank):
        if kind == "W":
            num_deferred -= 1
        elif kind != "F":
            most = max(most, num_deferred)
            num_deferred += kind == "I"
    return most


@lru_cache(maxsize=8192)
def _list_schedule_moments(
    name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int | None, rank: int
) -> tuple[BackwardMoment, ...]:
    row = _load_row(name, num_ranks, num_micro_batches, virtual_stages, rank)
    return list_rank_moments(row, assign_stages(name, num_ranks, virtual_stages))


@lru_cache(maxsize=8192)
def _list_passes(
    name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int | None, rank: int
) -> tuple[RankPass, ...]:
    num_micro_batches = _limit_micro_batches(name, num_ranks, num_micro_batches)
    row = _load_row(name, num_ranks, num_micro_batches, virtual_stages, rank)
    return list_rank_passes(row, assign_stages(name, num_ranks, virtual_stages))


def _load_row(
    name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int | None, rank: int
) -> tuple[Action, ...]:
    schedule = (name, num_ranks, num_micro_batches, virtual_stages)
    if name in PIPELINE_SCHEDULES:
        return build_schedule_row(*schedule, rank)
    return load_cached_schedule(*schedule).rows[rank]


@lru_cache(maxsize=512)
def load_cached_schedule(
    name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int | None
) -> Schedule:
    """Build a schedule by name or read it from a file, once."""
    return load_schedule(name, num_ranks, num_micro_batches, virtual_stages)


def _count_zb_h1_passes(rank: int, num_ranks: int, num_micro_batches: int) -> int:
    """Count forward passes before the first backward pass, plus one for each deferred weight
    gradient."""
    warmup = min(num_ranks - 1 - rank, num_micro_batches)
    return warmup + min(num_micro_batches - warmup, rank + 1)


@lru_cache(maxsize=512)
def _count_scheduled_passes(
    name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int | None
) -> tuple[int, ...]:
    return count_peak_activations(load_schedule(name, num_ranks, num_micro_batches, virtual_stages))


def get_pipeline(
    facts: ModelFacts,
    layout: Layout,
    num_micro_batches: int,
    sequence_length: int,
    engine: EngineModel = SHARDWRIGHT_ENGINE,
    *,
    has_adapters: bool = False,
) -> PipelineStages:
    """Return the cached pipeline of a layout, with one stage if pp is 1. `engine` assigns
    layers to stages.

    Args:
        has_adapters: the matrices of layers are frozen.

    Raises:
        ScheduleError: the schedule does not support the number of micro-batches.
        LayoutError: fewer layers than stages.
    """
    key = (
        layout.pp,
        layout.schedule,
        layout.virtual_stages,
        num_micro_batches,
        sequence_length,
        engine,
        has_adapters,
    )
    pipeline = facts.pipeline_cache.get(key)
    if pipeline is None:
        pipeline = _build_pipeline(facts, layout, num_micro_batches, sequence_length, engine)
        if has_adapters and engine.has_ordered_frees:
            pipeline = replace(pipeline, has_frozen=True)
        facts.pipeline_cache[key] = pipeline
    assert isinstance(pipeline, PipelineStages)
    return pipeline


def _build_pipeline(
    facts: ModelFacts,
    layout: Layout,
    num_micro_batches: int,
    sequence_length: int,
    engine: EngineModel,
) -> PipelineStages:
    if layout.pp == 1:
        only_stage = StageLayers(
            tuple(kind.count for kind in facts.kinds), has_embedding=True, has_head=True, rank=0
        )
        return PipelineStages(
            "1f1b", 1, num_micro_batches, None, PipelinePartition((only_stage,), 1)
        )
    ranks = assign_stages(layout.schedule, layout.pp, layout.virtual_stages)
    key = ("stages", ranks, sequence_length, engine)
    partition = facts.pipeline_cache.get(key)
    if partition is None:
        stages = tuple(
            StageLayers(
                _count_layers(facts, stage.layers), stage.has_embedding, stage.has_head, stage.rank
            )
            for stage in engine.partition_layers(facts, layout, sequence_length)
        )
        partition = facts.pipeline_cache[key] = PipelinePartition(stages, layout.pp)
    assert isinstance(partition, PipelinePartition)
    return PipelineStages(
        layout.schedule,
        layout.pp,
        num_micro_batches,
        layout.virtual_stages,
        partition,
        bool(facts.frozen_names),
        engine.has_ordered_frees,
    )


def _count_layers(facts: ModelFacts, layers: range) -> tuple[int, ...]:
    slots = facts.slot_of_layer[layers.start : layers.stop]
    return tuple(map(slots.count, range(len(facts.kinds))))
