"""The best layouts of a model on a cluster: best-first search over every degree, with bounds that never pass over a better one.

A partial choice carries a lower bound of the seconds of every complete one below it. The choice with the least bound is opened
first; a complete one that comes up is better than all that is left. Memory is asked first: what no further choice can save is
checked before anything is timed.

    1  degrees, micro batch           compute of the first and the last rank, and their wait for the first micro-batch
    2  recompute, methods of tp, cp   that with its traffic; what the first rank keeps under the schedule that keeps least
    3  ZeRO                           data traffic that nothing can hide, the update
    4  schedule                       its own wait; memory of the first rank in full
    5  all                            the prediction itself
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import prod
from operator import mul

from shardwright.planner.activations import layer_activations
from shardwright.planner.bounds import DataBound, PipelineBound, PipelineBounds, overhead_of, together
from shardwright.planner.candidate import Candidate
from shardwright.planner.memory import StageLoad, least_memory, predict_memory
from shardwright.planner.pipeline import pipeline_of
from shardwright.planner.predict import Predictor
from shardwright.planner.prediction import Prediction
from shardwright.planner.rules import schedules_for
from shardwright.planner.space import PLAIN, Degrees, How, Question, Sharding, Space
from shardwright.planner.step import LayerCosts

SAME_SHARE = 0.03
"""Layouts whose steps differ by less than this are as good as equal: predictions are no better, and fewer cuts are simpler."""

PATIENCE = 200
"""Choices that are opened after the fastest is known, for the rest of the table; after that only simpler ones as good as the
best."""


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
            filled with what was predicted on the way. `Found.num_proven` says where the proof ends.
    """
    with _no_collection():
        return _Search(predictor, question).run(top, patience)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's collector of cycles held back: a search makes none, and hundreds of thousands of values that last until its end,
    which the collector would walk through again and again (a fifth of all time at 16,384 devices)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_Scheduled = tuple[PipelineBound, str, int | None]
"""A schedule by name and virtual stages, with its bound."""


@dataclass(frozen=True)
class _Costs:
    """Of a micro-batch: what its layers cost, and bytes that one layer of each kind keeps of it."""

    seconds: LayerCosts
    kept: tuple[float, ...]


class _Search:
    """One search; `heap` holds (bound, cuts, number, what to do when it is the least)."""

    def __init__(self, predictor: Predictor, question: Question) -> None:
        self.predictor, self.question, self.facts = predictor, question, predictor.facts
        self.space = Space(predictor.facts, question, predictor.cluster.domain_size)
        self.found = Found()
        self._growth, self._fixed = overhead_of(predictor, question.num_gpus)
        self._numbers = count()
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._seen: dict[tuple[int, ...], Prediction] = {}
        self._done: dict[tuple[int, ...], Prediction] = {}
        self._best_cuts: int | None = None
        self._costs: dict[tuple[object, ...], _Costs] = {}
        self._standing: dict[tuple[object, ...], float] = {}
        self._data: dict[tuple[object, ...], DataBound] = {}
        self._schedules: dict[tuple[int, int], list[tuple[PipelineBounds, str, int | None]]] = {}

    def run(self, top: int, patience: int) -> Found:
        for degrees in self.space.degrees():
            pipelines = self._pipelines(degrees)
            if pipelines:
                costs = self._costs_of(degrees, PLAIN).seconds
                # Schedules that hold the same stages have one bound between them.
                apart = {bounds.key: bounds for bounds, _, _ in pipelines}.values()
                self._push(min(bounds.seconds(costs) for bounds in apart), degrees, partial(self._open_degrees, degrees))
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

    def _push(self, seconds: float, degrees: Degrees, open_: Callable[[], None]) -> None:
        self._push_at(seconds * self._growth + self._fixed, degrees, open_)

    def _push_at(self, seconds: float, degrees: Degrees, open_: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (seconds, degrees.cuts, next(self._numbers), open_))

    # 2: recomputation, and how tp and cp talk

    def _open_degrees(self, degrees: Degrees) -> None:
        if self._is_settled(degrees):
            return
        pipelines = self._pipelines(degrees)
        # The first rank, whatever the schedule deals it; with everything sharded, before the other ways are asked.
        loads = [bounds.loads[0][0] for bounds, _, _ in pipelines]
        layers = tuple(map(min, zip(*(load.layers for load in loads), strict=True)))
        passes = tuple(map(min, zip(*([load.in_flight * n for n in load.layers] for load in loads), strict=True)))
        first = StageLoad(layers, embedding=True, head=degrees.pp == 1)
        standing = self._standing_of(degrees, first, self.space.most_sharded(degrees))
        for how in self.space.hows(degrees):
            costs = self._costs_of(degrees, how)
            kept = sum(map(mul, passes, costs.kept))
            if self._fits(standing + kept):
                bounds = [(bounds.bound(costs.seconds), name, virtual) for bounds, name, virtual in pipelines]
                least = min(bound.seconds for bound, _, _ in bounds)
                self._push(least, degrees, partial(self._open_how, degrees, how, costs, bounds, first, kept))

    def _pipelines(self, degrees: Degrees) -> list[tuple[PipelineBounds, str, int | None]]:
        """The schedules that can run."""
        key = (degrees.pp, degrees.accumulation)
        found = self._schedules.get(key)
        if found is None:
            found = self._schedules[key] = []
            for name, virtual in schedules_for(self.facts, degrees.pp, degrees.accumulation):
                candidate = self.space.candidate(degrees, PLAIN, schedule=(name, virtual))
                pipeline = pipeline_of(self.facts, candidate.layout, degrees.accumulation, candidate.sequence_length)
                found.append((PipelineBounds(pipeline), name, virtual))
        return found

    def _costs_of(self, degrees: Degrees, how: How) -> _Costs:
        key = (degrees.tp, degrees.cp, degrees.ep, degrees.micro_batch, how)
        found = self._costs.get(key)
        if found is None:
            candidate = self.space.candidate(degrees, how)
            kept = tuple(layer_activations(self.facts, kind, candidate).kept for kind in self.facts.kinds)
            found = self._costs[key] = _Costs(self.predictor.layer_costs(candidate), kept)
        return found

    # 3: ZeRO

    def _open_how(self, degrees: Degrees, how: How, costs: _Costs, bounds: list[_Scheduled], first: StageLoad, kept: float) -> None:
        if self._is_settled(degrees):
            return
        every = together([bound for bound, _, _ in bounds])
        for sharding in self.space.shardings(degrees):
            if self._is_done(degrees, sharding) or not self._fits(self._standing_of(degrees, first, sharding) + kept):
                continue
            extra = self._data_bound(degrees, sharding, every.layers).seconds(degrees.accumulation, every)
            open_ = partial(self._open_sharding, degrees, how, sharding, costs, bounds, extra)
            self._push(every.seconds + extra, degrees, open_)

    def _data_bound(self, degrees: Degrees, sharding: Sharding, least: tuple[int, ...]) -> DataBound:
        key = (degrees.pp, degrees.tp, degrees.cp, degrees.ep, sharding, least)
        found = self._data.get(key)
        if found is None:
            found = self._data[key] = DataBound(self.predictor, self.space.candidate(degrees, PLAIN, sharding), least)
        return found

    def _standing_of(self, degrees: Degrees, load: StageLoad, sharding: Sharding) -> float:
        """Bytes between steps of a rank."""
        key = (degrees.tp, degrees.cp, degrees.ep, degrees.data, degrees.accumulation > 1, load.layers, load.head, sharding)
        found = self._standing.get(key)
        if found is None:
            found = self._standing[key] = least_memory(self.facts, self.space.candidate(degrees, PLAIN, sharding), load)
        return found

    def _is_done(self, degrees: Degrees, sharding: Sharding) -> bool:
        return (degrees.pp, degrees.tp, degrees.cp, degrees.ep, sharding.zero_stage) in self._done

    def _is_settled(self, degrees: Degrees) -> bool:
        """Whether the best of every ZeRO stage is known for these degrees."""
        key = degrees[:4]
        return all((*key, zero) in self._done for zero in self.question.zero_stages)

    def _fits(self, num_bytes: float) -> bool:
        if num_bytes <= self.predictor.capacity:
            return True
        self.found.num_too_large += 1
        self.found.least_bytes = min(self.found.least_bytes, num_bytes)
        return False

    # 4: schedule

    def _open_sharding(
        self, degrees: Degrees, how: How, sharding: Sharding, costs: _Costs, bounds: list[_Scheduled], extra: float
    ) -> None:
        if self._is_done(degrees, sharding):
            return
        allowed, efficiency = self.question.allowed, self.predictor.efficiency
        for bound, name, virtual in bounds:
            load = bound.first
            if not self._fits(self._standing_of(degrees, load, sharding) + load.in_flight * sum(map(mul, load.layers, costs.kept))):
                continue
            chosen = self.space.candidate(degrees, how, sharding, (name, virtual))
            if self._fits(predict_memory(self.facts, chosen, load, efficiency).total) and (allowed is None or allowed(chosen)):
                self._push(bound.seconds + extra, degrees, partial(self._open_candidate, degrees, chosen, costs.seconds))

    # 5: everything

    def _open_candidate(self, degrees: Degrees, candidate: Candidate, costs: LayerCosts, *, simulated: bool = False) -> None:
        if key_of(candidate) in self._done:
            return
        if candidate.layout.pp > 1 and not simulated:
            # What was simulated before may say that others come first.
            seconds = self.predictor.bound(candidate, costs)
            if self._heap and seconds > self._heap[0][0]:
                self._push_at(seconds, degrees, partial(self._open_candidate, degrees, candidate, costs, simulated=True))
                return
        memory = self.predictor.memory(candidate, self.predictor.pipeline(candidate))
        if not self._fits(memory.total):
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
