"""Pipeline of a candidate: layers per stage, micro-batches in flight, and simulated time.

Builds and simulates the schedule that will run (`shardwright.schedule`). With many
micro-batches its steady state repeats: such a schedule is extrapolated from two shorter ones by
the time of one additional round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from shardwright.layout import Layout
from shardwright.placement import stages_of
from shardwright.planner.facts import ModelFacts
from shardwright.planner.in_flight import kept_passes
from shardwright.planner.memory import StageLoad
from shardwright.planner.stage_rules import StageRule, deal_by_running_sum, deal_evenly
from shardwright.schedule import Schedule, Times, load_schedule, seconds_of_step
from shardwright.schedule.families import rank_of_stage

_STRAIGHT_ROUNDS = (2, 3)
_OTHER_ROUNDS = (4, 6)
"""Micro-batches per rank of the two shorter schedules: with one stage per rank, and with
several, which reach steady state later. The result is within 0.4% of the full schedule if
stages differ by 8%."""


class StageSeconds(NamedTuple):
    """Seconds of one micro-batch through a stage. `weight_gradient` is the part of `backward`
    that a schedule may defer."""

    forward: float
    backward: float
    weight_gradient: float

    @property
    def total(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class StageLayers:
    """Layers of each kind in a stage, its rank, and whether it has the embedding and the
    head."""

    layers: tuple[int, ...]
    embedding: bool
    head: bool
    rank: int


@dataclass(frozen=True, eq=False)
class StageCut:
    """Partition of the layers into stages, and its per-rank sums, for any number of
    micro-batches."""

    stages: tuple[StageLayers, ...]
    num_ranks: int

    @cached_property
    def kinds(self) -> tuple[tuple[tuple[int, ...], bool, bool], ...]:
        """Distinct stages as (layers, embedding, head), in order of first occurrence."""
        return tuple(dict.fromkeys((stage.layers, stage.embedding, stage.head) for stage in self.stages))

    @cached_property
    def kind_of_stage(self) -> tuple[int, ...]:
        """Index into `kinds` of each stage."""
        return tuple(self.kinds.index((stage.layers, stage.embedding, stage.head)) for stage in self.stages)

    @cached_property
    def different_ranks(self) -> tuple[int, ...]:
        """First rank of each set of ranks with the same kinds of stages."""
        first: dict[tuple[int, ...], int] = {}
        for rank, stages in enumerate(self.held):
            first.setdefault(tuple(self.kind_of_stage[stage] for stage in stages), rank)
        return tuple(first.values())

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Stages of each rank."""
        return tuple(tuple(i for i, stage in enumerate(self.stages) if stage.rank == rank) for rank in range(self.num_ranks))

    @cached_property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each kind on each rank."""
        return tuple(_add_up([self.stages[index] for index in stages]) for stages in self.held)

    @cached_property
    def least(self) -> tuple[int, ...]:
        """Minimum number of layers of each kind on a rank."""
        return tuple(map(min, zip(*self.layers, strict=True)))

    @cached_property
    def most(self) -> tuple[int, ...]:
        """Maximum number of layers of each kind on a rank."""
        return tuple(map(max, zip(*self.layers, strict=True)))

    @cached_property
    def furthest(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Last rank of each set of ranks with equal stages, with the layers that a micro-batch
        passes before reaching it."""
        last: dict[tuple[object, ...], int] = {}
        for rank, stages in enumerate(self.held):
            rank_stages = [self.stages[index] for index in stages]
            last[self.layers[rank], any(stage.embedding for stage in rank_stages), any(stage.head for stage in rank_stages)] = rank
        return tuple((rank, _add_up(self.stages[: self.held[rank][0]])) for rank in last.values())

    def load(self, rank: int, in_flight: float) -> StageLoad:
        """Build the load of a rank."""
        rank_stages = [self.stages[index] for index in self.held[rank]]
        return StageLoad(
            layers=self.layers[rank],
            embedding=any(stage.embedding for stage in rank_stages),
            head=any(stage.head for stage in rank_stages),
            in_flight=in_flight,
            num_stages=len(rank_stages),
        )


def _add_up(stages: Sequence[StageLayers]) -> tuple[int, ...]:
    """Sum the layers of each kind."""
    return tuple(map(sum, zip(*(stage.layers for stage in stages), strict=True)))


@dataclass(frozen=True)
class PipelineShape:
    """Stages of a candidate and the schedule that orders their passes."""

    schedule: str
    num_ranks: int
    num_micro_batches: int
    virtual_stages: int | None
    cut: StageCut

    @property
    def stages(self) -> tuple[StageLayers, ...]:
        """Stages in the order in which a micro-batch passes them."""
        return self.cut.stages

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank."""
        return self.cut.held[rank]

    @cached_property
    def in_flight(self) -> tuple[float, ...]:
        """Peak number of saved passes per rank, in passes through all of its layers."""
        if self.num_ranks == 1:
            return (1.0,)
        peaks = kept_passes(self.schedule, self.num_ranks, self.num_micro_batches, self.virtual_stages)
        per_rank = len(self.stages) / self.num_ranks
        return tuple(peak / per_rank for peak in peaks)

    def load_of(self, rank: int) -> StageLoad:
        """Build the load of a rank."""
        return self.cut.load(rank, self.in_flight[rank])

    @cached_property
    def loads(self) -> tuple[StageLoad, ...]:
        """Loads of the distinct ranks; among ranks that differ only in micro-batches in flight,
        the one with most."""
        fullest: dict[tuple[object, ...], StageLoad] = {}
        for rank in range(self.num_ranks):
            load = self.load_of(rank)
            key = (load.layers, load.embedding, load.head)
            if key not in fullest or fullest[key].in_flight < load.in_flight:
                fullest[key] = load
        return tuple(fullest.values())


def pipeline_of(
    facts: ModelFacts, layout: Layout, num_micro_batches: int, sequence_length: int, rule: StageRule = "weighed"
) -> PipelineShape:
    """Return the cached pipeline of a layout, with one stage if pp is 1. `rule` assigns layers
    to stages.

    Raises:
        ScheduleError: the schedule does not support the number of micro-batches.
        LayoutError: fewer layers than stages.
    """
    key = (layout.pp, layout.schedule, layout.virtual_stages, num_micro_batches, sequence_length, rule)
    pipeline = facts.pipelines.get(key)
    if pipeline is None:
        pipeline = facts.pipelines[key] = _build(facts, layout, num_micro_batches, sequence_length, rule)
    assert isinstance(pipeline, PipelineShape)
    return pipeline


def _build(facts: ModelFacts, layout: Layout, num_micro_batches: int, sequence_length: int, rule: StageRule) -> PipelineShape:
    if layout.pp == 1:
        only_stage = StageLayers(tuple(kind.count for kind in facts.kinds), embedding=True, head=True, rank=0)
        return PipelineShape("1f1b", 1, num_micro_batches, None, StageCut((only_stage,), 1))
    ranks = rank_of_stage(layout.schedule, layout.pp, layout.virtual_stages)
    key = ("stages", ranks, sequence_length, rule)
    partition = facts.pipelines.get(key)
    if partition is None:
        stages = _stages(facts, layout, sequence_length) if rule == "weighed" else _dealt(facts, ranks, rule)
        partition = facts.pipelines[key] = StageCut(stages, layout.pp)
    assert isinstance(partition, StageCut)
    return PipelineShape(layout.schedule, layout.pp, num_micro_batches, layout.virtual_stages, partition)


def _stages(facts: ModelFacts, layout: Layout, sequence_length: int) -> tuple[StageLayers, ...]:
    """Partition the layers into stages as the trainer does."""
    stages = stages_of(facts.shape, layout, sequence_length)
    assert stages is not None, layout
    return tuple(StageLayers(_count(facts, stage.layers), stage.embedding, stage.head, stage.rank) for stage in stages)


def _dealt(facts: ModelFacts, ranks: Sequence[int], rule: StageRule) -> tuple[StageLayers, ...]:
    """Partition the layers into stages as another framework does."""
    if rule == "even":
        counts = deal_evenly(facts.shape.num_layers, len(ranks))
        last = len(ranks) - 1
    else:
        costs = [sum(float(p.num_in * p.num_out) for p in facts.kinds[slot].products) for slot in facts.slot_of_layer]
        counts, last = deal_by_running_sum(costs, float(facts.head.num_in * facts.head.num_out), len(ranks))
    begin = 0
    stages = []
    for stage, (count, rank) in enumerate(zip(counts, ranks, strict=True)):
        layers = _count(facts, range(begin, begin + count))
        stages.append(StageLayers(layers, embedding=stage == 0, head=stage == last, rank=rank))
        begin += count
    return tuple(stages)


def _count(facts: ModelFacts, layers: range) -> tuple[int, ...]:
    counts = [0] * len(facts.kinds)
    for layer in layers:
        counts[facts.slot_of_layer[layer]] += 1
    return tuple(counts)


def simulate(pipeline: PipelineShape, seconds: Sequence[StageSeconds], send: float) -> float:
    """Return seconds from the first forward to the last backward pass. `seconds` are per kind
    of stage (`StageCut.kinds`)."""
    makespan = simulate_stages(pipeline, tuple(seconds[kind] for kind in pipeline.cut.kind_of_stage), send)
    if pipeline.num_ranks > 1:
        _REFERENCES.setdefault(_key(pipeline), deque(maxlen=_KEPT_REFERENCES)).append((tuple(seconds), send, makespan))
    return makespan


def simulate_stages(pipeline: PipelineShape, seconds: Sequence[StageSeconds], send: float) -> float:
    """Return the same as `simulate`, with `seconds` per stage."""
    if pipeline.num_ranks == 1:
        return pipeline.num_micro_batches * sum(stage.total for stage in seconds)
    schedule = (pipeline.schedule, pipeline.num_ranks, pipeline.num_micro_batches, pipeline.virtual_stages)
    return _simulate(*schedule, tuple(seconds), send)


@lru_cache(maxsize=4096)
def _simulate(name: str, ranks: int, num: int, virtual: int | None, seconds: tuple[StageSeconds, ...], send: float) -> float:
    """Simulate a schedule. Cached, because layouts that differ only in ZeRO often have the same
    times."""
    times = Times(
        tuple(stage.forward for stage in seconds),
        tuple(stage.backward - stage.weight_gradient for stage in seconds),
        tuple(stage.weight_gradient for stage in seconds),
        (send,) * (len(seconds) - 1),
    )
    return _extended(
        lambda micro_batches: seconds_of_step(_schedule(name, ranks, micro_batches, virtual), times),
        ranks,
        num,
        straight=len(seconds) == ranks,
    )


def was_simulated(pipeline: PipelineShape) -> bool:
    """Return True if `bound_simulation` has an earlier simulation of the pipeline's
    schedule."""
    return pipeline.num_ranks > 1 and _key(pipeline) in _REFERENCES


def bound_simulation(pipeline: PipelineShape, seconds: Sequence[StageSeconds], send: float) -> float:
    """Return a lower bound of `simulate`, from earlier simulations of the same schedule. 0 if
    there are none.

    A step's time grows with every pass and scales with all of them: if each part is at least a
    share of its earlier value, so is the step.
    """
    if pipeline.num_ranks == 1:
        return 0.0
    best = 0.0
    for earlier_seconds, earlier_send, makespan in _REFERENCES.get(_key(pipeline), ()):
        share = send / earlier_send if earlier_send > 0 else float("inf")
        for now, earlier in zip(seconds, earlier_seconds, strict=True):
            share = min(share, now[0] / earlier[0], now[2] / earlier[2] if earlier[2] else share)
            # A schedule may split the backward pass: both parts must be at least the share.
            share = min(share, (now[1] - now[2]) / (earlier[1] - earlier[2]))
            if share * makespan <= best:
                break
        else:
            best = share * makespan
    return best


_REFERENCES: dict[tuple[object, ...], deque[tuple[tuple[StageSeconds, ...], float, float]]] = {}
"""Latest simulations per schedule and partition: seconds of the kinds of stages, of a send, and
of the step."""
_KEPT_REFERENCES = 12


def _key(pipeline: PipelineShape) -> tuple[object, ...]:
    partition = pipeline.cut
    return pipeline.schedule, pipeline.num_ranks, pipeline.num_micro_batches, pipeline.virtual_stages, partition.kind_of_stage


def _extended(of: Callable[[int], float], ranks: int, num: int, *, straight: bool) -> float:
    """Extrapolate a quantity that grows linearly with rounds of micro-batches, from two
    schedules in steady state."""
    short, long = (rounds * ranks for rounds in (_STRAIGHT_ROUNDS if straight else _OTHER_ROUNDS))
    rest = num % ranks
    if num <= long + rest:
        return of(num)
    # Both have the same remainder of a round, so that their end equals the end of this
    # schedule.
    low = of(short + rest)
    high = of(long + rest)
    return low + (high - low) / (long - short) * (num - short - rest)


@lru_cache(maxsize=512)
def _schedule(name: str, ranks: int, num: int, virtual: int | None) -> Schedule:
    return load_schedule(name, ranks, num, virtual)
