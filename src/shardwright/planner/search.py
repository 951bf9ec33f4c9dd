"""Best-first search for the best layouts of a model on a cluster.

All degrees are searched. A partial choice has a lower bound of the seconds of every complete
choice below it. The choice with the lowest bound is expanded first; a complete choice at the
top of the heap is better than all that remain. Memory is checked before time: a partial choice
whose minimum memory does not fit is discarded.

    level                            bounds
    0  degrees                       as 1 with the whole batch as one micro-batch, the cheapest
                                     per row; then as 1 with the largest micro-batch that fits
    1  micro-batch                   the first rank's minimum memory over recomputation and
                                     schedules; compute of the first and the last rank, and
                                     their wait for the first micro-batch
    2  recompute, methods of tp, cp  the same with communication; the first rank's minimum
                                     memory over schedules
    3  ZeRO                          exposed data-parallel communication, the update
    4  schedule                      its own wait; its memory on the first rank
    5  all                           full memory of the first rank; the prediction itself
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
"""Layouts whose step times differ by less than this share count as equal: predictions are no
more precise, and less partitioning is simpler."""

PATIENCE = 200
"""Choices expanded for the rest of the table after the fastest is known. After that, only
simpler ones that are as fast as the best."""

MORE_PATIENCE = 4
"""Factor of `PATIENCE` while the search has found fewer layouts than the table has rows, as few
fit."""


@dataclass
class Found:
    """Search result, best first, one prediction per `key_of`, and search statistics."""

    predictions: list[Prediction] = field(default_factory=list)
    num_proven: int = 0
    """Number of leading predictions that no unexplored layout can precede."""
    num_predicted: int = 0
    num_too_large: int = 0
    least_bytes: float = float("inf")
    """Smallest memory among candidates that did not fit."""
    with_room: Prediction | None = None
    """Best layout within the memory margin, if the best of all is tight. Not necessarily among
    `predictions`."""

    @property
    def chosen(self) -> Prediction | None:
        """Recommended layout. It is tight only if no layout fits with the memory margin."""
        return self.with_room or self.best

    @property
    def best(self) -> Prediction | None:
        """Layout with the least partitioning among those within `SAME_SHARE` of the fastest; of
        equal ones the fastest."""
        if not self.predictions:
            return None
        limit = self.predictions[0].time.step * (1 + SAME_SHARE)
        fastest = [prediction for prediction in self.predictions if prediction.time.step <= limit]
        return min(fastest, key=lambda prediction: (num_cuts(prediction.candidate), prediction.time.step))


def num_cuts(candidate: Candidate) -> tuple[int, int, int, int]:
    """Return a candidate's complexity: axes of model parallelism in use, the product of their
    degrees, ZeRO stage, recomputation."""
    layout = candidate.layout
    degrees = (layout.pp, layout.tp, layout.cp, layout.ep)
    num_axes = sum(degree > 1 for degree in degrees)
    return num_axes, prod(degrees), layout.zero_stage, ("none", "selective", "full").index(candidate.recompute)


def key_of(candidate: Candidate) -> tuple[int, ...]:
    """Return the key that distinguishes layouts in the table: degrees and ZeRO stage, without
    details."""
    layout = candidate.layout
    return layout.pp, layout.tp, layout.cp, layout.ep, layout.zero_stage


def search(predictor: Predictor, question: Question, *, top: int = 10, patience: int = PATIENCE) -> Found:
    """Find the best layout that fits and the simplest equally good one, with proof, and `top`
    layouts in total.

    If the best one is tight, also find the best one within the memory margin.

    Args:
        patience: choices expanded for the rest of the table once the best is known. After that,
            earlier predictions fill the table. `Found.num_proven` is the number of proven rows.
    """
    with _no_collection():
        result = _Search(predictor, question, predictor.capacity).run(top, patience)
        if result.best is not None and result.best.is_tight:
            # A separate search: the fastest of a key may be tight while another micro-batch or
            # recomputation is not.
            capacity = predictor.capacity / (1 + MEMORY_ERROR_SHARE)
            best = _Search(predictor, question, capacity).run(1, patience).best
            result.with_room = next((prediction for prediction in result.predictions if prediction == best), best)
        return result


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable Python's cyclic garbage collector during a search.

    A search creates no cycles, but hundreds of thousands of values that live until its end,
    which the collector would traverse again and again (a fifth of all time at 16,384 devices).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Search:
    """State of one search. `heap` entries are (bound, axes in use, counter, function that
    expands the choice)."""

    def __init__(self, predictor: Predictor, question: Question, capacity: float) -> None:
        self.capacity = capacity
        self.predictor = predictor
        self.question = question
        self.facts = predictor.facts
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
        remaining = patience
        while self._heap:
            bound, num_axes, _, expand = heapq.heappop(self._heap)
            if self._done:
                is_equal = bound <= next(iter(self._done.values())).time.step * (1 + SAME_SHARE)
                is_exhausted = remaining < 0 and (len(self._seen) >= top or remaining < (1 - MORE_PATIENCE) * patience)
                is_complete = is_exhausted or len(self._done) >= top
                if is_complete and not is_equal:
                    break
                if is_exhausted and self._best_cuts is not None and num_axes >= self._best_cuts:
                    continue  # neither faster nor simpler
                remaining -= 1
            expand()
        # Predictions that were not proven follow: equally good ones may be unexplored.
        table = self._done | {key: prediction for key, prediction in self._seen.items() if key not in self._done}
        self.found.predictions = sorted(table.values(), key=lambda prediction: prediction.time.step)
        self.found.num_proven = len(self._done)
        self._heap.clear()  # break the reference cycles without the collector
        return self.found

    def _push(self, seconds: float, degrees: Degrees, open_: Callable[[], None]) -> None:
        self._push_at(seconds * self._growth + self._fixed, degrees, open_)

    def _push_at(self, seconds: float, degrees: Degrees, open_: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (seconds, degrees.cuts, next(self._numbers), open_))

    # Levels 0 and 1: degrees and micro-batches; minimum over recomputation and methods of tp
    # and cp.

    def _push_roughly(self, alike: tuple[Degrees, ...]) -> None:
        """Push degrees that differ in their micro-batch, before any memory check.

        The bound is the cost of all rows in one micro-batch, for which a few costs suffice for
        all pipelines. Most degrees are never expanded.
        """
        rows = self.question.global_batch_size
        if len(alike) == 1 or rows is None or self.predictor.cluster.profile is not None:
            self._open_alike(alike)  # measured rates need not be monotonic, so no bound holds
            return
        whole_batch = alike[-1]._replace(micro_batch=rows)
        self._push(self._least(alike, whole_batch), whole_batch, partial(self._push_alike, alike))

    def _push_alike(self, alike: tuple[Degrees, ...]) -> None:
        """Push these degrees with the bound of the largest micro-batch that fits. A larger one
        never costs more per row, so this bound holds for all."""
        largest = next((degrees for degrees in reversed(alike) if self._may_fit(degrees)), None)
        if largest is None:
            return
        fitting = tuple(degrees for degrees in alike if degrees.micro_batch <= largest.micro_batch)
        self._push(self._least(alike, largest), largest, partial(self._open_alike, fitting))

    def _least(self, alike: tuple[Degrees, ...], largest: Degrees) -> float:
        """Return the minimum seconds of all variants, from the cost per row of the largest
        micro-batch."""
        costs = self._costs_of(largest, PLAIN)
        rows = alike[0].micro_batch * alike[0].accumulation
        # Of the largest one's time: the first micro-batch may be the smallest.
        share = alike[0].micro_batch / largest.micro_batch
        pipelines = self._apart(alike)
        return min((bounds.seconds(costs, rows / largest.micro_batch, share) for bounds in pipelines), default=float("inf"))

    def _apart(self, alike: tuple[Degrees, ...]) -> list[PipelineBounds]:
        """List the distinct pipeline bounds of all micro-batch variants."""
        key = (alike[0].pp, tuple(degrees.accumulation for degrees in alike))
        bounds = self._any_schedule.get(key)
        if bounds is None:
            options = [pipelines for degrees in alike if (pipelines := self._pipelines(degrees)) is not None]
            bounds = self._any_schedule[key] = list({b.key: b for pipelines in options for b in pipelines.apart}.values())
        return bounds

    def _open_alike(self, alike: tuple[Degrees, ...]) -> None:
        for degrees in alike:
            pipelines = self._pipelines(degrees)
            if pipelines is not None and self._may_fit(degrees):
                costs = self._costs_of(degrees, PLAIN)
                min_seconds = min(bounds.seconds(costs, degrees.accumulation) for bounds in pipelines.apart)
                self._push(min_seconds, degrees, partial(self._open_degrees, degrees, pipelines))

    def _may_fit(self, degrees: Degrees) -> bool:
        pipelines = self._pipelines(degrees)
        if pipelines is None:
            return False
        key = (degrees.tp, degrees.cp, degrees.micro_batch)
        alternatives = self._leanest.get(key)
        if alternatives is None:
            executions = [PLAIN._replace(recompute=recompute) for recompute in self.question.recomputes]
            alternatives = self._leanest[key] = [self._kept_of(degrees, execution) for execution in executions]
        activation_bytes = min(alternative.least(pipelines.passes) for alternative in alternatives)
        return self._fits_live(degrees, activation_bytes) and self._fits_live(
            degrees, self._standing_of(degrees, pipelines.first, self.space.most_sharded(degrees)).at_loss + activation_bytes
        )

    # Level 2: recomputation, methods of tp and cp.

    def _open_degrees(self, degrees: Degrees, pipelines: Pipelines) -> None:
        if self._is_settled(degrees):
            return
        # The first rank's minimum over schedules with everything sharded, before the individual
        # options.
        standing = self._standing_of(degrees, pipelines.first, self.space.most_sharded(degrees)).at_loss
        for how in self.space.hows(degrees):
            activations = self._kept_of(degrees, how)
            min_bytes = activations.least(pipelines.passes)
            if self._fits_live(degrees, standing + min_bytes):
                costs = self._costs_of(degrees, how)
                bounds = {each.key: each.bound(costs, degrees.accumulation) for each in pipelines.apart}
                seconds = min(bound.seconds for bound in bounds.values())
                choice = ChosenHow(degrees, how, pipelines, costs, activations, min_bytes, bounds)
                self._push(seconds, degrees, partial(self._open_how, choice))

    def _pipelines(self, degrees: Degrees) -> Pipelines | None:
        """Return the schedules that can run, None if there are none."""
        key = (degrees.pp, degrees.accumulation)
        if key not in self._schedules:
            options = []
            for name, virtual in schedules_for(self.facts, degrees.pp, degrees.accumulation):
                candidate = self.space.candidate(degrees, PLAIN, schedule=(name, virtual))
                pipeline = self.predictor.pipeline(candidate)
                options.append(Scheduled(self._bounds_of(pipeline), pipeline.load_of(0), name, virtual))
            self._schedules[key] = with_least(options, alone=degrees.pp == 1) if options else None
        return self._schedules[key]

    def _bounds_of(self, pipeline: PipelineShape) -> PipelineBounds:
        bounds = PipelineBounds(pipeline)
        return self._bounds.setdefault(bounds.key, bounds)

    def _costs_of(self, degrees: Degrees, how: How) -> LayerCosts:
        key = (degrees.tp, degrees.cp, degrees.ep, degrees.micro_batch, how)
        costs = self._costs.get(key)
        if costs is None:
            costs = self._costs[key] = self.predictor.layer_costs(self.space.candidate(degrees, how))
        return costs

    def _kept_of(self, degrees: Degrees, how: How) -> Kept:
        key = (degrees.tp, degrees.cp, degrees.micro_batch, how)
        activations = self._kept.get(key)
        if activations is None:
            candidate = self.space.candidate(degrees, how)
            layers = [layer_activations(self.facts, kind, candidate) for kind in self.facts.kinds]
            backward_bytes = tuple(layer.rebuilt + layer.gradients for layer in layers)
            activations = self._kept[key] = Kept(tuple(layer.kept for layer in layers), backward_bytes)
        return activations

    # Level 3: ZeRO.

    def _open_how(self, chosen: ChosenHow) -> None:
        degrees = chosen.degrees
        if self._is_settled(degrees):
            return
        merged = together(list(chosen.bounds.values()))
        for sharding in self.space.shardings(degrees):
            standing = self._standing_of(degrees, chosen.pipelines.first, sharding).at_loss
            if self._is_done(degrees, sharding) or not self._fits_live(degrees, standing + chosen.least_kept):
                continue
            weight_seconds, exposed_seconds = self._data_bound(degrees, sharding, merged.layers).seconds(
                degrees.accumulation, merged
            )
            seconds = merged.seconds + weight_seconds + exposed_seconds
            self._push(seconds, degrees, partial(self._open_sharding, chosen, sharding, weight_seconds, exposed_seconds))

    def _data_bound(self, degrees: Degrees, sharding: Sharding, least: tuple[int, ...]) -> DataBound:
        key = (degrees.pp, degrees.tp, degrees.cp, degrees.ep, sharding, least)
        bound = self._data.get(key)
        if bound is None:
            bound = self._data[key] = DataBound(self.predictor, self.space.candidate(degrees, PLAIN, sharding), least)
        return bound

    def _standing_of(self, degrees: Degrees, load: StageLoad, sharding: Sharding) -> Standing:
        """Return the cached memory of a rank that persists between steps."""
        key = (degrees.tp, degrees.cp, degrees.ep, degrees.data, degrees.accumulation > 1, load.layers, load.head, sharding)
        memory = self._standing.get(key)
        if memory is None:
            memory = self._standing[key] = standing_of(self.facts, self.space.candidate(degrees, PLAIN, sharding), load)
        return memory

    def _is_done(self, degrees: Degrees, sharding: Sharding) -> bool:
        return (degrees.pp, degrees.tp, degrees.cp, degrees.ep, sharding.zero_stage) in self._done

    def _is_settled(self, degrees: Degrees) -> bool:
        """Return True if the best layout of every ZeRO stage is known for these degrees."""
        key = degrees[:4]
        return all((*key, zero) in self._done for zero in self.question.zero_stages)

    def _fits_live(self, degrees: Degrees, num_bytes: float) -> bool:
        """Return True if `num_bytes` live bytes fit beside the minimum reserve of allocator and
        driver."""
        efficiency = self.predictor.efficiency
        communicators = efficiency.communicator_bytes * (degrees.cuts + (degrees.data > 1))
        overhead_bytes = efficiency.reserve_bytes + efficiency.context_bytes + communicators
        return self._fits(num_bytes * (1 + efficiency.reserve_share) + overhead_bytes)

    def _fits(self, num_bytes: float) -> bool:
        if num_bytes <= self.capacity:
            return True
        self.found.num_too_large += 1
        self.found.least_bytes = min(self.found.least_bytes, num_bytes)
        return False

    # Level 4: schedule.

    def _open_sharding(self, chosen: ChosenHow, sharding: Sharding, moving: float, after: float) -> None:
        degrees = chosen.degrees
        if self._is_done(degrees, sharding):
            return
        for scheduled in chosen.pipelines.each:
            load = scheduled.first
            activation_bytes = chosen.kept.least(tuple(load.in_flight * count for count in load.layers))
            if self._fits_live(degrees, self._standing_of(degrees, load, sharding).at_loss + activation_bytes):
                seconds = chosen.bounds[scheduled.bounds.key].seconds + moving + after
                self._push(seconds, degrees, partial(self._open_schedule, chosen, sharding, scheduled, after))

    # Level 5: complete candidates.

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
        expand = partial(self._open_candidate, chosen.degrees, candidate, chosen.costs)
        if candidate.layout.pp > 1 and self._heap:
            # Earlier simulations of the schedule may prove that other choices come first.
            seconds = (self.predictor.pass_bound(candidate, chosen.costs) + after) * self._growth + self._fixed
            if seconds > self._heap[0][0]:
                self._push_at(seconds, chosen.degrees, expand)
                return
        expand()

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
        """Record a prediction that precedes everything left in the heap: the best of its
        key."""
        self._done.setdefault(key_of(prediction.candidate), prediction)
        fastest = next(iter(self._done.values()))
        if prediction.time.step <= fastest.time.step * (1 + SAME_SHARE):
            num_axes = num_cuts(prediction.candidate)[0]
            self._best_cuts = num_axes if self._best_cuts is None else min(num_axes, self._best_cuts)
