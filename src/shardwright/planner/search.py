"""The best layouts of a model on a cluster: best-first search over every degree, with bounds that never pass over a better one.

A partial choice carries a lower bound of the seconds of every complete one below it. The choice with the least bound is opened
first; a
complete one that comes up is better than all that is left.

    1  degrees, micro batch           compute of the first and the last rank, and their wait for the first micro-batch
    2  recompute, methods of tp, cp   that with its traffic; memory that no further choice can save is checked when it is opened
    3  ZeRO                           data traffic that nothing can hide, the update
    4  schedule                       its own wait; memory in full
    5  all                            the prediction itself
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, product
from math import prod
from typing import Any, NamedTuple

from shardwright.config.schema import RecomputeKind
from shardwright.layout import CpMethod
from shardwright.planner.bounds import PipelineBound, PipelineBounds, bound_data, together, with_overhead
from shardwright.planner.candidate import Candidate
from shardwright.planner.memory import StageLoad, least_activations, least_memory
from shardwright.planner.pipeline import pipeline_of
from shardwright.planner.predict import Predictor
from shardwright.planner.prediction import Prediction
from shardwright.planner.rules import (
    divisors,
    schedules_for,
    why_not_context,
    why_not_expert,
    why_not_tensor,
)
from shardwright.planner.step import LayerCosts

SAME_SHARE = 0.03
"""Layouts whose steps differ by less than this are as good as equal: predictions are no better, and fewer cuts are simpler."""


PATIENCE = 200
"""Choices that are opened after the fastest is known, for the rest of the table; after that only simpler ones as good as the
best."""


@dataclass(frozen=True)
class Question:
    """What is to be planned: a plain candidate with everything that is not searched, and what is.

    `template` gives sequence length, precision, optimizer, adapters, wrapping and so on; its layout and batch are replaced.
    `global_batch_size` None keeps `micro_batch_sizes` x accumulation 1 a rank, whatever the number of ranks.
    """

    template: Candidate
    num_gpus: int
    global_batch_size: int | None
    micro_batch_sizes: tuple[int, ...] | None = None
    """Those to try; None: all that divide the batch."""
    accumulations: tuple[int, ...] | None = None
    recomputes: tuple[RecomputeKind, ...] = ("none", "selective", "full")
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    allowed: Callable[[Candidate], bool] | None = None
    """What else a candidate must satisfy (that `train` can run it, for `layout: auto`)."""


@dataclass(frozen=True)
class _Degrees:
    pp: int
    tp: int
    cp: int
    ep: int
    data: int
    micro_batch: int
    accumulation: int

    @property
    def cuts(self) -> int:
        """Axes of model parallelism in use."""
        return (self.pp > 1) + (self.tp > 1) + (self.cp > 1) + (self.ep > 1)


class _How(NamedTuple):
    """What changes the cost of a micro-batch beside the degrees."""

    recompute: RecomputeKind
    sequence_parallel: bool
    method: CpMethod


_Sharding = tuple[int, int]
"""ZeRO's stage, and how many replicas hold the same shards."""

_Bounded = tuple[PipelineBound, str, int | None]
"""A schedule by name and virtual stages, with its bound."""

_PLAIN = _How("none", True, "ring")


@dataclass
class Found:
    """What a search found, best first, one prediction per `key_of`; and how much of the space it had to look at."""

    predictions: list[Prediction] = field(default_factory=list)
    num_proven: int = 0
    """How many of the first predictions nothing that was left out can come before."""
    num_predicted: int = 0
    num_too_large: int = 0
    least_bytes: float = float("inf")
    """The smallest need among those that did not fit."""

    @property
    def chosen(self) -> Prediction | None:
        """The fewest cuts among those within `SAME_SHARE` of the fastest; of equal ones the fastest."""
        if not self.predictions:
            return None
        limit = self.predictions[0].time.step * (1 + SAME_SHARE)
        near = [prediction for prediction in self.predictions if prediction.time.step <= limit]
        return min(near, key=lambda prediction: (num_cuts(prediction.candidate), prediction.time.step))


def num_cuts(candidate: Candidate) -> tuple[int, int, int, int]:
    """How much a candidate is cut: axes of model parallelism in use, over how many ranks together, ZeRO's stage, recomputation."""
    layout = candidate.layout
    degrees = (layout.pp, layout.tp, layout.cp, layout.ep)
    model = sum(degree > 1 for degree in degrees)
    return model, prod(degrees), layout.zero_stage, ("none", "selective", "full").index(candidate.recompute)


def key_of(candidate: Candidate) -> tuple[int, ...]:
    """What makes two candidates different layouts in a table: the degrees and ZeRO's stage, not their details."""
    layout = candidate.layout
    return layout.pp, layout.tp, layout.cp, layout.ep, layout.zero_stage


def search(predictor: Predictor, question: Question, *, top: int = 10, patience: int = PATIENCE) -> Found:
    """The best layout that fits, and the simplest that is as good, proven; and the next best, `top` of them.

    Args:
        patience: choices that are opened for the rest of the table once the best is known; when they are used up, the table is
        filled
            with what was predicted on the way. `Found.num_proven` says where the proof ends.
    """
    return _Search(predictor, question).run(top, patience)


class _Search:
    """One search; `heap` holds (bound, number, what to do when it is the least)."""

    def __init__(self, predictor: Predictor, question: Question) -> None:
        self.predictor, self.question, self.facts = predictor, question, predictor.facts
        self.found = Found()
        self._numbers = count()
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._seen: dict[tuple[int, ...], Prediction] = {}
        self._best_cuts: int | None = None
        self._costs: dict[tuple[object, ...], LayerCosts] = {}
        self._standing: dict[tuple[object, ...], float] = {}
        self._schedules: dict[tuple[int, int], list[tuple[PipelineBounds, str, int | None]]] = {}
        self._done: dict[tuple[int, ...], Prediction] = {}

    def run(self, top: int, patience: int) -> Found:
        for degrees in self._degrees():
            bounds = [bounds.bound(self._costs_of(degrees, _PLAIN)) for bounds, _, _ in self._pipelines(degrees)]
            if bounds:
                self._push(min(bound.seconds for bound in bounds), degrees, partial(self._open_degrees, degrees))
        left = patience
        while self._heap:
            bound, cuts, _, open_ = heapq.heappop(self._heap)
            if self._done:
                near = bound <= next(iter(self._done.values())).time.step * (1 + SAME_SHARE)
                full = left < 0 or len(self._done) >= top
                if full and not near:
                    break
                if left < 0 and self._best_cuts is not None and cuts >= self._best_cuts:
                    continue  # neither faster nor simpler
                left -= 1
            open_()
        # What was predicted but has not come up in its turn follows: good, though others as good may not have been looked at.
        table = self._done | {key: prediction for key, prediction in self._seen.items() if key not in self._done}
        self.found.predictions = sorted(table.values(), key=lambda prediction: prediction.time.step)
        self.found.num_proven = len(self._done)
        return self.found

    def _push(self, seconds: float, degrees: _Degrees, open_: Callable[[], None]) -> None:
        self._push_at(with_overhead(self.predictor, seconds, self.question.num_gpus), degrees, open_)

    def _push_at(self, seconds: float, degrees: _Degrees, open_: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (seconds, degrees.cuts, next(self._numbers), open_))

    # 1: degrees and micro batch

    def _degrees(self) -> Iterator[_Degrees]:
        facts, question = self.facts, self.question
        for tp in divisors(question.num_gpus):
            if tp > facts.shape.num_heads or why_not_tensor(facts, tp):
                continue
            for cp in divisors(question.num_gpus // tp):
                if not self._ways(tp, cp):
                    continue
                for pp in divisors(question.num_gpus // tp // cp):
                    if pp > facts.shape.num_layers:
                        break
                    data = question.num_gpus // tp // cp // pp
                    for micro_batch, accumulation in batches(question, data):
                        for ep in self._expert_degrees(data * cp):
                            yield _Degrees(pp, tp, cp, ep, data, micro_batch, accumulation)

    def _expert_degrees(self, ranks: int) -> Iterable[int]:
        experts = self.facts.shape.experts
        return (1,) if experts is None else (e for e in divisors(experts.num_experts) if not why_not_expert(self.facts, e, ranks))

    # 2: recomputation, and how tp and cp talk

    def _open_degrees(self, degrees: _Degrees) -> None:
        if self._is_settled(degrees):
            return
        for recompute, (sequence_parallel, method) in product(self.question.recomputes, self._ways(degrees.tp, degrees.cp)):
            how = _How(recompute, sequence_parallel, method)
            costs = self._costs_of(degrees, how)
            bounds = [(bounds.bound(costs), name, virtual) for bounds, name, virtual in self._pipelines(degrees)]
            least = min(bound.seconds for bound, _, _ in bounds)
            self._push(least, degrees, partial(self._open_how, degrees, how, costs, bounds))

    def _ways(self, tp: int, cp: int) -> list[tuple[bool, CpMethod]]:
        """Sequence parallelism on or off, and methods of context parallelism, that can cut the rows."""
        methods: tuple[CpMethod, ...] = ("ring", "all_gather", "ulysses") if cp > 1 else ("auto",)
        found = []
        for sequence_parallel, method in product((True, False) if tp > 1 else (True,), methods):
            layout = replace(self.question.template.layout, tp=tp, cp=cp, sequence_parallel=sequence_parallel, cp_method=method)
            if why_not_context(self.facts, layout, self.question.template.sequence_length) is None:
                found.append((sequence_parallel, method))
        return found

    def _pipelines(self, degrees: _Degrees) -> list[tuple[PipelineBounds, str, int | None]]:
        """The schedules that can run."""
        key = (degrees.pp, degrees.accumulation)
        if key not in self._schedules:
            template = self.question.template
            self._schedules[key] = found = []
            for name, virtual in schedules_for(self.facts, degrees.pp, degrees.accumulation):
                layout = replace(template.layout, pp=degrees.pp, schedule=name, virtual_stages=virtual)
                pipeline = pipeline_of(self.facts, layout, degrees.accumulation, template.sequence_length)
                found.append((PipelineBounds(pipeline), name, virtual))
        return self._schedules[key]

    def _costs_of(self, degrees: _Degrees, how: _How) -> LayerCosts:
        key = (degrees.tp, degrees.cp, degrees.ep, degrees.micro_batch, how)
        if key not in self._costs:
            self._costs[key] = self.predictor.layer_costs(self._candidate(degrees, how))
        return self._costs[key]

    def _candidate(self, degrees: _Degrees, how: _How, **changes: Any) -> Candidate:
        template = self.question.template
        sharded = degrees.data * degrees.cp > 1
        given: dict[str, Any] = {"dp_replicate": 1, "dp_shard": degrees.data, "zero_stage": 3 if sharded else 0}
        given |= {axis: getattr(degrees, axis) for axis in ("pp", "tp", "cp", "ep")}
        given |= {"sequence_parallel": how.sequence_parallel, "cp_method": how.method, "schedule": "1f1b", "virtual_stages": None}
        return replace(
            template,
            layout=replace(template.layout, **(given | changes)),
            micro_batch_size=degrees.micro_batch,
            gradient_accumulation_steps=degrees.accumulation,
            recompute=how.recompute,
        )

    # 3: ZeRO

    def _open_how(self, degrees: _Degrees, how: _How, costs: LayerCosts, bounds: list[_Bounded]) -> None:
        if self._is_settled(degrees):
            return
        plain = self._candidate(degrees, how)
        # What the first rank holds whatever the schedule deals it, one pass kept; with everything sharded, before the others
        # are asked.
        layers = tuple(map(min, zip(*(bound.first.layers for bound, _, _ in bounds), strict=True)))
        first = StageLoad(layers, embedding=True, head=degrees.pp == 1)
        least = least_activations(self.facts, plain, first)
        if not self._fits(self._least_standing(degrees, how, first) + least):
            return
        every = together([bound for bound, _, _ in bounds])
        for option in self._zero(degrees):
            if self._is_done(degrees, option[0]) or not self._fits(self._standing_of(degrees, how, first, option) + least):
                continue
            candidate = self._candidate(degrees, how, **_sharding(degrees, option))
            extra = bound_data(self.predictor, candidate, costs, every)
            self._push(
                every.seconds + extra, degrees, partial(self._open_sharding, degrees, how, option, candidate, costs, bounds, extra)
            )

    # 4: schedule

    def _open_sharding(
        self,
        degrees: _Degrees,
        how: _How,
        option: _Sharding,
        candidate: Candidate,
        costs: LayerCosts,
        bounds: list[_Bounded],
        extra: float,
    ) -> None:
        if key_of(candidate) in self._done:
            return
        for bound, name, virtual in bounds:
            load = bound.first
            kept = load.in_flight * least_activations(self.facts, candidate, load)
            if self._fits(self._standing_of(degrees, how, load, option) + kept):
                chosen = replace(candidate, layout=replace(candidate.layout, schedule=name, virtual_stages=virtual))
                if self.question.allowed is None or self.question.allowed(chosen):
                    self._push(bound.seconds + extra, degrees, partial(self._open_candidate, degrees, chosen, costs))

    def _zero(self, degrees: _Degrees) -> Iterator[_Sharding]:
        """ZeRO stages, sharded over all data ranks or over those that share a fast domain; stage 0 replicates."""
        local = max(1, self.predictor.cluster.domain_size // (degrees.tp * degrees.cp))
        for zero in self.question.zero_stages:
            if zero == 0:
                if degrees.ep == 1 or degrees.cp % degrees.ep == 0:
                    yield 0, degrees.data
            elif degrees.data * degrees.cp > 1:
                near = max(shards for shards in divisors(degrees.data) if shards <= local)
                for shards in dict.fromkeys((degrees.data, near)):
                    if shards * degrees.cp > 1 and not why_not_expert(self.facts, degrees.ep, shards * degrees.cp):
                        yield zero, degrees.data // shards

    def _standing_of(self, degrees: _Degrees, how: _How, load: StageLoad, option: _Sharding) -> float:
        key = (degrees.tp, degrees.cp, degrees.ep, degrees.data, degrees.accumulation > 1, load.layers, load.head, option)
        if key not in self._standing:
            self._standing[key] = least_memory(self.facts, self._candidate(degrees, how, **_sharding(degrees, option)), load)
        return self._standing[key]

    def _least_standing(self, degrees: _Degrees, how: _How, load: StageLoad) -> float:
        """With everything sharded that may be."""
        stage = max(self.question.zero_stages)
        option = (stage, 1) if stage and degrees.data * degrees.cp > 1 else (0, degrees.data)
        return self._standing_of(degrees, how, load, option)

    def _is_done(self, degrees: _Degrees, zero: int) -> bool:
        return (degrees.pp, degrees.tp, degrees.cp, degrees.ep, zero) in self._done

    def _is_settled(self, degrees: _Degrees) -> bool:
        """Whether the best of every ZeRO stage is known for these degrees."""
        return all(self._is_done(degrees, zero) for zero in self.question.zero_stages)

    def _fits(self, num_bytes: float) -> bool:
        if num_bytes <= self.predictor.capacity:
            return True
        self.found.num_too_large += 1
        self.found.least_bytes = min(self.found.least_bytes, num_bytes)
        return False

    # 5: everything

    def _open_candidate(self, degrees: _Degrees, candidate: Candidate, costs: LayerCosts, *, simulated: bool = False) -> None:
        if key_of(candidate) in self._done:
            return
        pipeline = self.predictor.pipeline(candidate)
        memory = self.predictor.memory(candidate, pipeline)
        if not self._fits(memory.total):
            return
        if candidate.layout.pp > 1 and not simulated:
            # What was simulated before may say that others come first.
            seconds = self.predictor.bound(candidate, costs)
            if self._heap and seconds > self._heap[0][0]:
                self._push_at(seconds, degrees, partial(self._open_candidate, degrees, candidate, costs, simulated=True))
                return
        self.found.num_predicted += 1
        prediction = self.predictor.predict(candidate, memory, costs)
        known = self._seen.get(key_of(candidate))
        if known is None or prediction.time.step < known.time.step:
            self._seen[key_of(candidate)] = prediction
        self._push_at(prediction.time.step, degrees, partial(self._finish, prediction))

    def _finish(self, prediction: Prediction) -> None:
        """The least of all that is left: the best of its key."""
        self._done.setdefault(key_of(prediction.candidate), prediction)
        fastest = next(iter(self._done.values()))
        if prediction.time.step <= fastest.time.step * (1 + SAME_SHARE):
            cuts = num_cuts(prediction.candidate)[0]
            self._best_cuts = cuts if self._best_cuts is None else min(cuts, self._best_cuts)


def _sharding(degrees: _Degrees, option: _Sharding) -> dict[str, int]:
    zero, replicas = option
    return {"zero_stage": zero, "dp_replicate": replicas, "dp_shard": degrees.data // replicas}


def batches(question: Question, data: int) -> Iterator[tuple[int, int]]:
    """Micro batch and accumulation of `data` data ranks."""
    total = question.global_batch_size
    if total is None:
        yield from product(question.micro_batch_sizes or (1,), question.accumulations or (1,))
        return
    for micro_batch in divisors(total // data) if total % data == 0 else ():
        accumulation = total // data // micro_batch
        if question.micro_batch_sizes is not None and micro_batch not in question.micro_batch_sizes:
            continue
        if question.accumulations is None or accumulation in question.accumulations:
            yield micro_batch, accumulation
