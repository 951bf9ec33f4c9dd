"""The pipeline of a candidate: which layers each stage has, how much is in flight, and when everything happens. Torch-free.

Builds and simulates the very schedule that will run (`shardwright.schedule`). With many micro-batches its steady state repeats:
what is
asked of such a schedule is asked of two shorter ones, and what one more round adds is added as often as it is needed.
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

_STRAIGHT_ROUNDS, _OTHER_ROUNDS = (2, 3), (4, 6)
"""Micro-batches per rank of the two shorter schedules: with one stage a rank, and with several, which settle later. What they say
is then within 0.4% of the whole schedule where stages differ by 8%."""


class StageSeconds(NamedTuple):
    """One micro-batch through a stage. `weight_gradient` is the part of `backward` that a schedule may put off."""

    forward: float
    backward: float
    weight_gradient: float

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class StageLayers:
    """What a stage holds: layers of each kind, and the ends."""

    layers: tuple[int, ...]
    embedding: bool
    head: bool
    rank: int


@dataclass(frozen=True, eq=False)
class StageCut:
    """The stages of a pipeline and what they come to rank by rank, whatever the number of micro-batches."""

    stages: tuple[StageLayers, ...]
    num_ranks: int

    @cached_property
    def kinds(self) -> tuple[tuple[tuple[int, ...], bool, bool], ...]:
        """Stages that differ: layers, with the embedding, with the head; in the order in which they come first."""
        return tuple(dict.fromkeys((stage.layers, stage.embedding, stage.head) for stage in self.stages))

    @cached_property
    def kind_of_stage(self) -> tuple[int, ...]:
        """Which of `kinds` each stage is."""
        return tuple(self.kinds.index((stage.layers, stage.embedding, stage.head)) for stage in self.stages)

    @cached_property
    def different_ranks(self) -> tuple[int, ...]:
        """The first of each set of ranks whose stages are of the same kinds."""
        first: dict[tuple[int, ...], int] = {}
        for rank, stages in enumerate(self.held):
            first.setdefault(tuple(self.kind_of_stage[stage] for stage in stages), rank)
        return tuple(first.values())

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Stages that each rank holds."""
        return tuple(tuple(i for i, stage in enumerate(self.stages) if stage.rank == rank) for rank in range(self.num_ranks))

    @cached_property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each kind that each rank holds."""
        return tuple(_add_up([self.stages[index] for index in stages]) for stages in self.held)

    @cached_property
    def least(self) -> tuple[int, ...]:
        """Layers of each kind that no rank goes below."""
        return tuple(map(min, zip(*self.layers, strict=True)))

    @cached_property
    def most(self) -> tuple[int, ...]:
        """Layers of each kind that no rank goes above."""
        return tuple(map(max, zip(*self.layers, strict=True)))

    @cached_property
    def furthest(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The last of each set of ranks that hold alike, with the layers that a micro-batch passes before it comes to them."""
        last: dict[tuple[object, ...], int] = {}
        for rank, stages in enumerate(self.held):
            mine = [self.stages[index] for index in stages]
            last[self.layers[rank], any(stage.embedding for stage in mine), any(stage.head for stage in mine)] = rank
        return tuple((rank, _add_up(self.stages[: self.held[rank][0]])) for rank in last.values())

    def load(self, rank: int, in_flight: float) -> StageLoad:
        """What a rank has to hold."""
        mine = [self.stages[index] for index in self.held[rank]]
        return StageLoad(
            layers=self.layers[rank],
            embedding=any(stage.embedding for stage in mine),
            head=any(stage.head for stage in mine),
            in_flight=in_flight,
            num_stages=len(mine),
        )


def _add_up(stages: Sequence[StageLayers]) -> tuple[int, ...]:
    """Layers of each kind; none of no stage."""
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
        """In the order in which a micro-batch passes them."""
        return self.cut.stages

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that a rank holds."""
        return self.cut.held[rank]

    @cached_property
    def in_flight(self) -> tuple[float, ...]:
        """Per rank, passes through all of its layers that are kept at a time."""
        if self.num_ranks == 1:
            return (1.0,)
        peaks = kept_passes(self.schedule, self.num_ranks, self.num_micro_batches, self.virtual_stages)
        per_rank = len(self.stages) / self.num_ranks
        return tuple(peak / per_rank for peak in peaks)

    def load_of(self, rank: int) -> StageLoad:
        """What a rank has to hold."""
        return self.cut.load(rank, self.in_flight[rank])

    @cached_property
    def loads(self) -> tuple[StageLoad, ...]:
        """What has to be held: of ranks that differ in what is in flight only, the one with most."""
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
    """The pipeline of a layout; one stage where pp is 1. `rule` is how its trainer deals layers to stages.

    Raises:
        ScheduleError: a schedule that does not fit the micro-batches.
        LayoutError: fewer layers than stages.
    """
    key = (layout.pp, layout.schedule, layout.virtual_stages, num_micro_batches, sequence_length, rule)
    found = facts.pipelines.get(key)
    if found is None:
        found = facts.pipelines[key] = _build(facts, layout, num_micro_batches, sequence_length, rule)
    assert isinstance(found, PipelineShape)
    return found


def _build(facts: ModelFacts, layout: Layout, num_micro_batches: int, sequence_length: int, rule: StageRule) -> PipelineShape:
    if layout.pp == 1:
        everything = StageLayers(tuple(kind.count for kind in facts.kinds), embedding=True, head=True, rank=0)
        return PipelineShape("1f1b", 1, num_micro_batches, None, StageCut((everything,), 1))
    ranks = rank_of_stage(layout.schedule, layout.pp, layout.virtual_stages)
    key = ("stages", ranks, sequence_length, rule)
    cut = facts.pipelines.get(key)
    if cut is None:
        stages = _stages(facts, layout, sequence_length) if rule == "weighed" else _dealt(facts, ranks, rule)
        cut = facts.pipelines[key] = StageCut(stages, layout.pp)
    assert isinstance(cut, StageCut)
    return PipelineShape(layout.schedule, layout.pp, num_micro_batches, layout.virtual_stages, cut)


def _stages(facts: ModelFacts, layout: Layout, sequence_length: int) -> tuple[StageLayers, ...]:
    """The stages as the engine cuts them."""
    stages = stages_of(facts.shape, layout, sequence_length)
    assert stages is not None, layout
    return tuple(StageLayers(_count(facts, stage.layers), stage.embedding, stage.head, stage.rank) for stage in stages)


def _dealt(facts: ModelFacts, ranks: Sequence[int], rule: StageRule) -> tuple[StageLayers, ...]:
    """The stages as another trainer deals them."""
    if rule == "even":
        counts, last = deal_evenly(facts.shape.num_layers, len(ranks)), len(ranks) - 1
    else:
        costs = [sum(float(p.num_in * p.num_out) for p in facts.kinds[slot].products) for slot in facts.slot_of_layer]
        counts, last = deal_by_running_sum(costs, float(facts.head.num_in * facts.head.num_out), len(ranks))
    begin, stages = 0, []
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
    """Seconds from the first forward to the last backward pass; `seconds` per kind of stage (`StageCut.kinds`)."""
    found = simulate_stages(pipeline, tuple(seconds[kind] for kind in pipeline.cut.kind_of_stage), send)
    if pipeline.num_ranks > 1:
        _REFERENCES.setdefault(_key(pipeline), deque(maxlen=_KEPT_REFERENCES)).append((tuple(seconds), send, found))
    return found


def simulate_stages(pipeline: PipelineShape, seconds: Sequence[StageSeconds], send: float) -> float:
    """The same, with a number for each stage."""
    if pipeline.num_ranks == 1:
        return pipeline.num_micro_batches * sum(stage.total for stage in seconds)
    of = (pipeline.schedule, pipeline.num_ranks, pipeline.num_micro_batches, pipeline.virtual_stages)
    return _simulate(*of, tuple(seconds), send)


@lru_cache(maxsize=4096)
def _simulate(name: str, ranks: int, num: int, virtual: int | None, seconds: tuple[StageSeconds, ...], send: float) -> float:
    """Kept: layouts that differ in ZeRO alone often ask the same."""
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
    """Whether `bound_simulation` knows anything of the pipeline's schedule."""
    return pipeline.num_ranks > 1 and _key(pipeline) in _REFERENCES


def bound_simulation(pipeline: PipelineShape, seconds: Sequence[StageSeconds], send: float) -> float:
    """Seconds that `simulate` cannot go below, by what it said of the same schedule before: 0 where it was never asked.

    A step grows with every pass and scales with all of them: where each part is at least a share of what it was then, so is the
    step.
    """
    if pipeline.num_ranks == 1:
        return 0.0
    best = 0.0
    for before, sent, makespan in _REFERENCES.get(_key(pipeline), ()):
        share = send / sent if sent > 0 else float("inf")
        for now, then in zip(seconds, before, strict=True):
            share = min(share, now[0] / then[0], now[2] / then[2] if then[2] else share)
            # A schedule may or may not split the backward pass: both of its parts must be at least the share.
            share = min(share, (now[1] - now[2]) / (then[1] - then[2]))
            if share * makespan <= best:
                break
        else:
            best = share * makespan
    return best


_REFERENCES: dict[tuple[object, ...], deque[tuple[tuple[StageSeconds, ...], float, float]]] = {}
"""Per schedule and cut, the latest simulations: times of the kinds of stages, of a send, and the step."""
_KEPT_REFERENCES = 12


def _key(pipeline: PipelineShape) -> tuple[object, ...]:
    cut = pipeline.cut
    return pipeline.schedule, pipeline.num_ranks, pipeline.num_micro_batches, pipeline.virtual_stages, cut.kind_of_stage


def _extended(of: Callable[[int], float], ranks: int, num: int, *, straight: bool) -> float:
    """A quantity that grows evenly with the rounds of micro-batches, by two schedules that are long enough to have settled."""
    short, long = (rounds * ranks for rounds in (_STRAIGHT_ROUNDS if straight else _OTHER_ROUNDS))
    rest = num % ranks
    if num <= long + rest:
        return of(num)
    # The same remainder of a round in both, so that the end of the schedule is the end of this one.
    low, high = (of(short + rest)), (of(long + rest))
    return low + (high - low) / (long - short) * (num - short - rest)


@lru_cache(maxsize=512)
def _schedule(name: str, ranks: int, num: int, virtual: int | None) -> Schedule:
    return load_schedule(name, ranks, num, virtual)
