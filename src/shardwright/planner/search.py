"""The best layouts of a model on a cluster: best-first search over every degree, with bounds that never pass over a better one.

A partial choice carries a lower bound of the seconds of every complete one below it. The choice with the least bound is opened
first; a complete one that comes up is better than all that is left. Memory is asked first: what no further choice can save is
checked before anything is timed.

    0  degrees                        as 1 of the whole batch at once: per row nothing costs less
                                      as 1 of its largest micro batch that fits
    1  micro batch                    what the first rank keeps under the leanest recomputation and schedule; compute of the first
                                      and the last rank, and their wait for the first micro-batch
    2  recompute, methods of tp, cp   that with its traffic; what the first rank keeps under the schedule that keeps least
    3  ZeRO                           data traffic that nothing can hide, the update
    4  schedule                       its own wait; what the first rank keeps under it
    5  all                            memory of the first rank in full; the prediction itself
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

from shardwright.planner.activations import layer_activations
from shardwright.planner.bounds import DataBound, PipelineBounds, PipelineKey, overhead_of, together
from shardwright.planner.candidate import Candidate
from shardwright.planner.memory import StageLoad, Standing, predict_memory, standing_of
from shardwright.planner.partial import ChosenHow, Kept, Pipelines, Scheduled, with_least
from shardwright.planner.pipeline import PipelineShape, was_simulated
from shardwright.planner.predict import Predictor
from shardwright.planner.prediction import MEMORY_ERROR_SHARE, Prediction
from shardwright.planner.rules import schedules_for
from shardwright.planner.space import PLAIN, Degrees, How, Question, Sharding, Space
from shardwright.planner.step import LayerCosts

SAME_SHARE = 0.03
"""Layouts whose steps differ by less than this are as good as equal: predictions are no better, and fewer cuts are simpler."""

PATIENCE = 200
"""Choices that are opened after the fastest is known, for the rest of the table; after that only simpler ones as good as the
best."""

MORE_PATIENCE = 4
"""Times so many choices are opened while fewer layouts were met than the table has rows: where little fits, few are."""


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
    with_room: Prediction | None = None
    """The best with room for the error in memory, where the best of all is tight. Not necessarily among `predictions`."""

    @property
    def chosen(self) -> Prediction | None:
        """The layout to recommend. A tight one only where none has room for the error in memory."""
        return self.with_room or self.best

    @property
    def best(self) -> Prediction | None:
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
    """The best layout that fits, and the simplest that is as good, proven; and the next best, `top` of them. Where that best one
    is tight, the best with room for the error in memory is searched for, too.

    Args:
        patience: choices that are opened for the rest of the table once the best is known; when they are used up, the table is
            filled with what was predicted on the way. `Found.num_proven` says where the proof ends.
    """
    with _no_collection():
        found = _Search(predictor, question, predictor.capacity).run(top, patience)
        if found.best is not None and found.best.is_tight:
            # A search of its own: of one key the fastest may be tight, and another micro batch or recomputation may not.
            capacity = predictor.capacity / (1 + MEMORY_ERROR_SHARE)
            best = _Search(predictor, question, capacity).run(1, patience).best
            found.with_room = next((known for known in found.predictions if known == best), best)
        return found


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


class _Search:
    """One search; `heap` holds (bound, cuts, number, what to do when it is the least)."""

    def __init__(self, predictor: Predictor, question: Question, capacity: float) -> None:
        self.capacity = capacity
        self.predictor, self.question, self.facts = predictor, question, predictor.facts
        self.space = Space(predictor.facts, question, predictor.cluster.domain_size)
        self.found = Found()
        self._growth, self._fixed = overhead_of(predictor, question.num_gpus)
        self._numbers = count()
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._seen: dict[tuple[int, ...], Prediction] = {}
        self._done: dict[tuple[int, ...], Prediction] = {}
        self._best_cuts: int | None = None
        self._costs: dict[tuple[object, ...], LayerCosts] = {}
        self._kept: dict[tuple[object, ...], Kept] = {}
        self._leanest: dict[tuple[object, ...], list[Kept]] = {}
        self._standing: dict[tuple[object, ...], Standing] = {}
        self._data: dict[tuple[object, ...], DataBound] = {}
        self._schedules: dict[tuple[int, int], Pipelines | None] = {}
        self._any_schedule: dict[tuple[object, ...], list[PipelineBounds]] = {}
        self._bounds: dict[PipelineKey, PipelineBounds] = {}

    def run(self, top: int, patience: int) -> Found:
        for alike in self.space.degrees():
            self._push_roughly(alike)
        left = patience
        while self._heap:
            bound, cuts, _, open_ = heapq.heappop(self._heap)
            if self._done:
                near = bound <= next(iter(self._done.values())).time.step * (1 + SAME_SHARE)
                spent = left < 0 and (len(self._seen) >= top or left < (1 - MORE_PATIENCE) * patience)
                full = spent or len(self._done) >= top
                if full and not near:
                    break
                if spent and self._best_cuts is not None and cuts >= self._best_cuts:
                    continue  # neither faster nor simpler
                left -= 1
            open_()
        # What was predicted but has not come up in its turn follows: good, though others as good may not have been looked at.
        table = self._done | {key: prediction for key, prediction in self._seen.items() if key not in self._done}
        self.found.predictions = sorted(table.values(), key=lambda prediction: prediction.time.step)
        self.found.num_proven = len(self._done)
        self._heap.clear()  # what was never opened refers back to this search: let go of it without the collector of cycles
        return self.found

    def _push(self, seconds: float, degrees: Degrees, open_: Callable[[], None]) -> None:
        self._push_at(seconds * self._growth + self._fixed, degrees, open_)

    def _push_at(self, seconds: float, degrees: Degrees, open_: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (seconds, degrees.cuts, next(self._numbers), open_))

    # 0 and 1: degrees, with micro batches; what recomputation, tp and cp can save at most

    def _push_roughly(self, alike: tuple[Degrees, ...]) -> None:
        """Degrees that differ in their micro batch, before memory is asked: by what rows cost that all go at once, which few costs
        say of all pipelines. Most degrees never come up again."""
        rows = self.question.global_batch_size
        if len(alike) == 1 or rows is None or self.predictor.cluster.profile is not None:
            self._open_alike(alike)  # measured rates may be anything
            return
        most = alike[-1]._replace(micro_batch=rows)
        self._push(self._least(alike, most), most, partial(self._push_alike, alike))

    def _push_alike(self, alike: tuple[Degrees, ...]) -> None:
        """The same with the largest micro batch that fits: more rows at once never cost more each, so one bound holds for all."""
        largest = next((degrees for degrees in reversed(alike) if self._may_fit(degrees)), None)
        if largest is None:
            return
        fitting = tuple(degrees for degrees in alike if degrees.micro_batch <= largest.micro_batch)
        self._push(self._least(alike, largest), largest, partial(self._open_alike, fitting))

    def _least(self, alike: tuple[Degrees, ...], largest: Degrees) -> float:
        """Seconds of any of them at least, by what a row costs in the largest micro batch."""
        costs, rows = self._costs_of(largest, PLAIN), alike[0].micro_batch * alike[0].accumulation
        share = alike[0].micro_batch / largest.micro_batch  # of the largest one's time: a first micro-batch as small as may be
        pipelines = self._apart(alike)
        return min((bounds.seconds(costs, rows / largest.micro_batch, share) for bounds in pipelines), default=float("inf"))

    def _apart(self, alike: tuple[Degrees, ...]) -> list[PipelineBounds]:
        """Pipelines of any of the micro batches, each set of stages once."""
        key = (alike[0].pp, tuple(degrees.accumulation for degrees in alike))
        found = self._any_schedule.get(key)
        if found is None:
            every = [pipelines for degrees in alike if (pipelines := self._pipelines(degrees)) is not None]
            found = self._any_schedule[key] = list({b.key: b for pipelines in every for b in pipelines.apart}.values())
        return found

    def _open_alike(self, alike: tuple[Degrees, ...]) -> None:
        for degrees in alike:
            pipelines = self._pipelines(degrees)
            if pipelines is not None and self._may_fit(degrees):
                costs = self._costs_of(degrees, PLAIN)
                least = min(bounds.seconds(costs, degrees.accumulation) for bounds in pipelines.apart)
                self._push(least, degrees, partial(self._open_degrees, degrees, pipelines))

    def _may_fit(self, degrees: Degrees) -> bool:
        pipelines = self._pipelines(degrees)
        if pipelines is None:
            return False
        key = (degrees.tp, degrees.cp, degrees.micro_batch)
        leanest = self._leanest.get(key)
        if leanest is None:
            ways = [PLAIN._replace(recompute=recompute) for recompute in self.question.recomputes]
            leanest = self._leanest[key] = [self._kept_of(degrees, way) for way in ways]
        kept = min(each.least(pipelines.passes) for each in leanest)
        return self._fits_live(degrees, kept) and self._fits_live(
            degrees, self._standing_of(degrees, pipelines.first, self.space.most_sharded(degrees)).at_loss + kept
        )

    # 2: recomputation, and how tp and cp talk

    def _open_degrees(self, degrees: Degrees, pipelines: Pipelines) -> None:
        if self._is_settled(degrees):
            return
        # The first rank, whatever the schedule deals it; with everything sharded, before the other ways are asked.
        standing = self._standing_of(degrees, pipelines.first, self.space.most_sharded(degrees)).at_loss
        for how in self.space.hows(degrees):
            kept = self._kept_of(degrees, how)
            least = kept.least(pipelines.passes)
            if self._fits_live(degrees, standing + least):
                costs = self._costs_of(degrees, how)
                bounds = {each.key: each.bound(costs, degrees.accumulation) for each in pipelines.apart}
                seconds = min(bound.seconds for bound in bounds.values())
                so_far = ChosenHow(degrees, how, pipelines, costs, kept, least, bounds)
                self._push(seconds, degrees, partial(self._open_how, so_far))

    def _pipelines(self, degrees: Degrees) -> Pipelines | None:
        """The schedules that can run; None where there is none."""
        key = (degrees.pp, degrees.accumulation)
        if key not in self._schedules:
            each = []
            for name, virtual in schedules_for(self.facts, degrees.pp, degrees.accumulation):
                candidate = self.space.candidate(degrees, PLAIN, schedule=(name, virtual))
                pipeline = self.predictor.pipeline(candidate)
                each.append(Scheduled(self._bounds_of(pipeline), pipeline.load_of(0), name, virtual))
            self._schedules[key] = with_least(each, alone=degrees.pp == 1) if each else None
        return self._schedules[key]

    def _bounds_of(self, pipeline: PipelineShape) -> PipelineBounds:
        bounds = PipelineBounds(pipeline)
        return self._bounds.setdefault(bounds.key, bounds)

    def _costs_of(self, degrees: Degrees, how: How) -> LayerCosts:
        key = (degrees.tp, degrees.cp, degrees.ep, degrees.micro_batch, how)
        found = self._costs.get(key)
        if found is None:
            found = self._costs[key] = self.predictor.layer_costs(self.space.candidate(degrees, how))
        return found

    def _kept_of(self, degrees: Degrees, how: How) -> Kept:
        key = (degrees.tp, degrees.cp, degrees.micro_batch, how)
        found = self._kept.get(key)
        if found is None:
            candidate = self.space.candidate(degrees, how)
            layers = [layer_activations(self.facts, kind, candidate) for kind in self.facts.kinds]
            made = tuple(layer.rebuilt + layer.gradients for layer in layers)
            found = self._kept[key] = Kept(tuple(layer.kept for layer in layers), made)
        return found

    # 3: ZeRO

    def _open_how(self, chosen: ChosenHow) -> None:
        degrees = chosen.degrees
        if self._is_settled(degrees):
            return
        every = together(list(chosen.bounds.values()))
        for sharding in self.space.shardings(degrees):
            standing = self._standing_of(degrees, chosen.pipelines.first, sharding).at_loss
            if self._is_done(degrees, sharding) or not self._fits_live(degrees, standing + chosen.least_kept):
                continue
            moving, after = self._data_bound(degrees, sharding, every.layers).seconds(degrees.accumulation, every)
            seconds = every.seconds + moving + after
            self._push(seconds, degrees, partial(self._open_sharding, chosen, sharding, moving, after))

    def _data_bound(self, degrees: Degrees, sharding: Sharding, least: tuple[int, ...]) -> DataBound:
        key = (degrees.pp, degrees.tp, degrees.cp, degrees.ep, sharding, least)
        found = self._data.get(key)
        if found is None:
            found = self._data[key] = DataBound(self.predictor, self.space.candidate(degrees, PLAIN, sharding), least)
        return found

    def _standing_of(self, degrees: Degrees, load: StageLoad, sharding: Sharding) -> Standing:
        """What a rank holds between steps."""
        key = (degrees.tp, degrees.cp, degrees.ep, degrees.data, degrees.accumulation > 1, load.layers, load.head, sharding)
        found = self._standing.get(key)
        if found is None:
            found = self._standing[key] = standing_of(self.facts, self.space.candidate(degrees, PLAIN, sharding), load)
        return found

    def _is_done(self, degrees: Degrees, sharding: Sharding) -> bool:
        return (degrees.pp, degrees.tp, degrees.cp, degrees.ep, sharding.zero_stage) in self._done

    def _is_settled(self, degrees: Degrees) -> bool:
        """Whether the best of every ZeRO stage is known for these degrees."""
        key = degrees[:4]
        return all((*key, zero) in self._done for zero in self.question.zero_stages)

    def _fits_live(self, degrees: Degrees, num_bytes: float) -> bool:
        """Whether so many live bytes fit beside what the allocator and the driver hold in any case."""
        efficiency = self.predictor.efficiency
        communicators = efficiency.communicator_bytes * (degrees.cuts + (degrees.data > 1))
        beside = efficiency.reserve_bytes + efficiency.context_bytes + communicators
        return self._fits(num_bytes * (1 + efficiency.reserve_share) + beside)

    def _fits(self, num_bytes: float) -> bool:
        if num_bytes <= self.capacity:
            return True
        self.found.num_too_large += 1
        self.found.least_bytes = min(self.found.least_bytes, num_bytes)
        return False

    # 4: schedule

    def _open_sharding(self, chosen: ChosenHow, sharding: Sharding, moving: float, after: float) -> None:
        degrees = chosen.degrees
        if self._is_done(degrees, sharding):
            return
        for scheduled in chosen.pipelines.each:
            load = scheduled.first
            kept = chosen.kept.least(tuple(load.in_flight * count for count in load.layers))
            if self._fits_live(degrees, self._standing_of(degrees, load, sharding).at_loss + kept):
                seconds = chosen.bounds[scheduled.bounds.key].seconds + moving + after
                self._push(seconds, degrees, partial(self._open_schedule, chosen, sharding, scheduled, after))

    # 5: everything

    def _open_schedule(self, chosen: ChosenHow, sharding: Sharding, scheduled: Scheduled, after: float) -> None:
        if self._is_done(chosen.degrees, sharding):
            return
        schedule = (scheduled.name, scheduled.virtual_stages)
        candidate = self.space.candidate(chosen.degrees, chosen.how, sharding, schedule)
        if self.question.allowed is not None and not self.question.allowed(candidate):
            return
        standing = self._standing_of(chosen.degrees, scheduled.first, sharding)
        if not self._fits(predict_memory(self.facts, candidate, scheduled.first, self.predictor.efficiency, standing).total):
            return
        open_ = partial(self._open_candidate, chosen.degrees, candidate, chosen.costs)
        if candidate.layout.pp > 1 and self._heap:
            # What was simulated before may say that others come first.
            seconds = (self.predictor.pass_bound(candidate, chosen.costs) + after) * self._growth + self._fixed
            if seconds > self._heap[0][0]:
                self._push_at(seconds, chosen.degrees, open_)
                return
        open_()

    def _open_candidate(self, degrees: Degrees, candidate: Candidate, costs: LayerCosts, *, bounded: bool = False) -> None:
        if key_of(candidate) in self._done:
            return
        if self._heap and not bounded and was_simulated(self.predictor.pipeline(candidate)):
            seconds = self.predictor.bound(candidate, costs)
            if seconds > self._heap[0][0]:
                self._push_at(seconds, degrees, partial(self._open_candidate, degrees, candidate, costs, bounded=True))
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
