"""Best-first search for the best layouts of a model on a cluster.

All degrees are searched. A partial choice has a lower bound of the seconds of every complete
choice below it. The choice with the lowest bound is expanded first; a complete choice at the
top of the queue is better than all that remain. Memory is checked before time: a partial choice
whose minimum memory does not fit is discarded.

    level                            bounds
    0  degrees                       as 1 with the whole batch as one micro-batch, the cheapest
                                     per row; then as 1 with the largest micro-batch that fits
    1  micro-batch                   the first rank's minimum memory over recomputation and
                                     schedules: what persists, and what passes in flight save;
                                     compute of the first and the last rank, and their wait for
                                     the first micro-batch
    2  recompute, methods of tp, cp  the same with communication; the first rank's minimum
                                     memory over schedules
    3  ZeRO                          exposed data-parallel communication, the update
    4  schedule                      its own wait; its memory on the first rank
    5  all                           full memory of the first rank; the prediction itself
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.planner.prediction import Prediction
from shardwright.planner.predictor import Predictor
from shardwright.planner.search.bounds import MinReserve, compute_overhead
from shardwright.planner.search.choice_costs import ChoiceCosts
from shardwright.planner.search.choice_queue import ChoiceQueue
from shardwright.planner.search.result import (
    LayoutTable,
    SearchResult,
)
from shardwright.planner.search.space import (
    Degrees,
    PlanningProblem,
    SearchSpace,
    ShardingChoice,
)
from shardwright.planner.search.state import (
    CompleteChoice,
    PartialChoice,
    PipelineOptions,
    ScheduleOption,
)

MAX_EXTRA_EXPANSIONS = 175
"""Choices expanded for the rest of the table after the fastest is known. After that, only
simpler ones that are as fast as the best."""

TOO_LARGE_SHARE = 0.1
"""Share of an expansion as which a choice counts that yields none, mostly as it is too large."""

EXTRA_EXPANSION_FACTOR = 4
"""Factor of `MAX_EXTRA_EXPANSIONS` while the search has found fewer layouts than the table has
rows, as few fit."""


def search_layouts(
    predictor: Predictor,
    problem: PlanningProblem,
    *,
    num_layouts: int = 10,
    max_extra_expansions: int = MAX_EXTRA_EXPANSIONS,
) -> SearchResult:
    """Find the best layout that fits and the simplest equally good one, with proof, and
    `num_layouts` layouts in total.

    If the best one is tight, also find the best one that is not.

    Args:
        max_extra_expansions: choices expanded for the rest of the table once the best is known.
            After that, earlier predictions fill the table. `SearchResult.num_proven` is the
            number of proven rows.
    """
    # Whatever the search alone refers to is freed before the collector would traverse it.
    with _disable_garbage_collection():
        return _search(predictor, problem, num_layouts, max_extra_expansions)


def _search(
    predictor: Predictor, problem: PlanningProblem, num_layouts: int, max_extra_expansions: int
) -> SearchResult:
    space = SearchSpace(predictor.facts, problem, predictor.cluster.domain_size)
    costs = ChoiceCosts(predictor, problem, space)
    search = _LayoutSearch(costs, predictor.capacity_bytes)
    search.push_all()
    result = search.run(num_layouts, max_extra_expansions)
    if result.best is not None and result.best.is_tight:
        # A separate search: the fastest of a key may be tight while another micro-batch or
        # recomputation is not.
        capacity = predictor.capacity_bytes / (1 + predictor.uncertainty.memory_margin)
        best = search.fork(capacity).run(1, max_extra_expansions).best
        result.best_with_margin = next(
            (prediction for prediction in result.predictions if prediction == best), best
        )
    return result


@contextmanager
def _disable_garbage_collection() -> Iterator[None]:
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


class _LayoutSearch:
    """State of one search. Costs do not depend on the capacity, so searches share them."""

    def __init__(self, costs: ChoiceCosts, capacity_bytes: float) -> None:
        self.capacity_bytes = capacity_bytes
        self.predictor = costs.predictor
        self.problem = costs.problem
        self.facts = costs.facts
        self.space = costs.space
        self.costs = costs
        self.result = SearchResult()
        self._straggler_factor, self._fixed_seconds = compute_overhead(
            costs.predictor, costs.problem.num_gpus
        )
        self._reserve = MinReserve(costs.predictor.efficiency)
        self._queue = ChoiceQueue()
        self._unproven_queue = self._queue
        """The queue before the first proof."""
        self._table = LayoutTable()

    def push_all(self) -> None:
        """Push all degrees."""
        for variants in self.space.list_degrees():
            self._push_coarse(variants)

    def fork(self, capacity_bytes: float) -> _LayoutSearch:
        """Return a search of the layouts that fit a smaller capacity, continued from the first
        proof of this one.

        Until then this search has discarded only what does not fit its own capacity, so its queue
        had every other choice and prediction.
        """
        other = _LayoutSearch(self.costs, capacity_bytes)
        other._queue = self._unproven_queue.copy()
        for choice in other._queue.pop_all(_LayoutSearch._record_proven):
            (prediction,) = choice[-1]
            if prediction.memory.total <= capacity_bytes:
                other._table.add(prediction)
                other._queue.push_again(choice)
        return other

    def run(self, num_layouts: int, max_extra_expansions: int) -> SearchResult:
        remaining = float(max_extra_expansions)
        table = self._table
        while self._queue:
            if not table.proven and self._queue.first[3] is _LayoutSearch._record_proven:
                self._unproven_queue = self._queue.copy()
            bound, num_axes, _, expand, arguments = self._queue.pop()
            if table.proven:
                is_exhausted = remaining < 0 and (
                    len(table.predicted) >= num_layouts
                    or remaining < (1 - EXTRA_EXPANSION_FACTOR) * max_extra_expansions
                )
                is_complete = is_exhausted or len(table.proven) >= num_layouts
                if is_complete and bound > table.max_equal_seconds:
                    break
                if (
                    is_exhausted
                    and table.min_parallel_axes is not None
                    and num_axes >= table.min_parallel_axes
                ):
                    continue  # neither faster nor simpler
            num_left = len(self._queue)
            expand(self, *arguments)
            if table.proven:
                remaining -= 1.0 if len(self._queue) > num_left else TOO_LARGE_SHARE
        self.result.predictions = table.list_predictions()
        self.result.num_proven = len(table.proven)
        return self.result

    def _add_overhead(self, seconds: float) -> float:
        """Add what stragglers and the time between steps cost."""
        return seconds * self._straggler_factor + self._fixed_seconds

    # Levels 0 and 1: degrees and micro-batches; minimum over recomputation and methods of tp
    # and cp.

    def _push_coarse(self, variants: tuple[Degrees, ...]) -> None:
        """Push degrees that differ in their micro-batch, before any memory check.

        The bound is the cost of all rows in one micro-batch, for which a few costs suffice for
        all pipelines. Most degrees are never expanded.
        """
        rows = self.problem.global_batch_size
        if len(variants) == 1 or rows is None or self.predictor.cluster.profile is not None:
            self._expand_variants(
                variants
            )  # measured rates need not be monotonic, so no bound holds
            return
        whole_batch = variants[-1]._replace(micro_batch_size=rows)
        self._queue.push(
            self._add_overhead(self._bound_seconds(variants, whole_batch)),
            whole_batch,
            _LayoutSearch._push_largest,
            (variants,),
        )

    def _push_largest(self, variants: tuple[Degrees, ...]) -> None:
        """Push these degrees with the bound of the largest micro-batch that fits. A larger one
        never costs more per row, so this bound holds for all."""
        largest = next(
            (degrees for degrees in reversed(variants) if self._has_capacity_for_degrees(degrees)),
            None,
        )
        if largest is None:
            return
        fitting = tuple(
            degrees for degrees in variants if degrees.micro_batch_size <= largest.micro_batch_size
        )
        self._queue.push(
            self._add_overhead(self._bound_seconds(variants, largest)),
            largest,
            _LayoutSearch._expand_variants,
            (fitting,),
        )

    def _bound_seconds(self, variants: tuple[Degrees, ...], largest: Degrees) -> float:
        """Return the minimum seconds of all variants, from the cost per row of the largest
        micro-batch."""
        costs = self.costs.get_min_layer_costs(largest)
        rows = variants[0].micro_batch_size * variants[0].accumulation_steps
        # Of the largest one's time: the first micro-batch may be the smallest.
        share = variants[0].micro_batch_size / largest.micro_batch_size
        return self.costs.get_variant_bounds(variants).compute_seconds(
            costs, rows / largest.micro_batch_size, share
        )

    def _expand_variants(self, variants: tuple[Degrees, ...]) -> None:
        for degrees in variants:
            pipelines = self.costs.get_pipeline_options(degrees)
            if pipelines is not None and self._has_capacity_for_degrees(degrees):
                costs = self.costs.get_min_layer_costs(degrees)
                min_seconds = pipelines.bounds.compute_seconds(costs, degrees.accumulation_steps)
                choice = (degrees, pipelines)
                self._queue.push(
                    self._add_overhead(min_seconds), degrees, _LayoutSearch._expand_degrees, choice
                )

    def _has_capacity_for_degrees(self, degrees: Degrees) -> bool:
        pipelines = self.costs.get_pipeline_options(degrees)
        if pipelines is None:
            return False
        persistent_bytes = self.costs.get_min_persistent_bytes(degrees, pipelines)
        # Often too much without activations, which take longer to compute.
        if not self._has_capacity_for_live(degrees, persistent_bytes):
            return False
        if any(
            self._reserve.add_to(degrees, persistent_bytes + num_bytes) <= self.capacity_bytes
            for num_bytes in self.costs.iterate_min_activation_bytes(degrees, pipelines)
        ):
            return True
        self.result.num_too_large += 1
        return False

    # Level 2: recomputation, methods of tp and cp.

    def _expand_degrees(self, degrees: Degrees, pipelines: PipelineOptions) -> None:
        if self._is_complete(degrees):
            return
        # The first rank's minimum over schedules with everything sharded, before the individual
        # options.
        persistent_bytes = self.costs.get_min_persistent_bytes(degrees, pipelines)
        for execution in self.space.list_executions(degrees):
            activations = self.costs.get_activations(degrees, execution)
            min_bytes = activations.compute_min_bytes(
                pipelines.num_passes, degrees.micro_batch_size
            )
            if self._has_capacity_for_live(degrees, persistent_bytes + min_bytes):
                costs = self.costs.get_layer_costs(degrees, execution)
                seconds = pipelines.bounds.compute_seconds(costs, degrees.accumulation_steps)
                choice = PartialChoice(
                    degrees, execution, pipelines, costs, activations, min_bytes, seconds
                )
                self._queue.push(
                    self._add_overhead(seconds), degrees, _LayoutSearch._expand_execution, (choice,)
                )

    # Level 3: ZeRO.

    def _expand_execution(self, chosen: PartialChoice) -> None:
        degrees = chosen.degrees
        if self._is_complete(degrees):
            return
        bounds = chosen.pipelines.bounds
        longest = bounds.compute_longest_passes(chosen.costs)
        for sharding, persistent_bytes in self.costs.list_sharding_bytes(degrees, chosen.pipelines):
            if self._is_proven(degrees, sharding):
                continue
            if not self._has_capacity_for_live(
                degrees, persistent_bytes + chosen.min_activation_bytes
            ):
                continue
            weight_seconds, exposed_seconds = self.costs.get_data_bound(
                degrees, sharding, bounds.min_layers
            ).compute_seconds(degrees.accumulation_steps, longest)
            self._queue.push(
                self._add_overhead(chosen.min_seconds + weight_seconds + exposed_seconds),
                degrees,
                _LayoutSearch._expand_sharding,
                (chosen, sharding, weight_seconds, exposed_seconds),
            )

    def _is_proven(self, degrees: Degrees, sharding: ShardingChoice) -> bool:
        return (*degrees[:4], sharding.zero_stage) in self._table.proven

    def _is_complete(self, degrees: Degrees) -> bool:
        """Return True if the best layout of every ZeRO stage is known for these degrees."""
        key = degrees[:4]
        return all((*key, zero) in self._table.proven for zero in self.problem.zero_stages)

    def _has_capacity_for_live(self, degrees: Degrees, num_bytes: float) -> bool:
        return self._has_capacity_for(self._reserve.add_to(degrees, num_bytes))

    def _has_capacity_for(self, num_bytes: float) -> bool:
        if num_bytes <= self.capacity_bytes:
            return True
        self.result.num_too_large += 1
        return False

    # Level 4: schedule.

    def _expand_sharding(
        self,
        chosen: PartialChoice,
        sharding: ShardingChoice,
        weight_seconds: float,
        exposed_seconds: float,
    ) -> None:
        degrees = chosen.degrees
        if self._is_proven(degrees, sharding):
            return
        persistent = self.costs.list_schedule_bytes(degrees, sharding, chosen.pipelines)
        for (scheduled, pass_seconds, activation_bytes), persistent_bytes in zip(
            chosen.schedules, persistent, strict=True
        ):
            if self._has_capacity_for_live(degrees, persistent_bytes + activation_bytes):
                self._queue.push(
                    self._add_overhead(pass_seconds + weight_seconds + exposed_seconds),
                    degrees,
                    _LayoutSearch._expand_schedule,
                    (chosen, sharding, scheduled, exposed_seconds),
                )

    # Level 5: complete candidates.

    def _expand_schedule(
        self,
        chosen: PartialChoice,
        sharding: ShardingChoice,
        scheduled: ScheduleOption,
        exposed_seconds: float,
    ) -> None:
        if self._is_proven(chosen.degrees, sharding) or not self._has_capacity_for_deferred(
            chosen, sharding, scheduled
        ):
            return
        schedule = (scheduled.name, scheduled.virtual_stages)
        choice = self.costs.get_complete_choice(
            chosen.degrees, chosen.execution, sharding, schedule
        )
        if self.problem.is_allowed is not None and not self.problem.is_allowed(choice.candidate):
            return
        has_pipeline = choice.pipeline.num_ranks > 1
        if has_pipeline and not self._has_capacity_for(self.costs.get_memory(choice, 0).total):
            return
        if has_pipeline and self._queue:
            # Earlier simulations of the schedule may prove that other choices come first.
            seconds = self._add_overhead(self._bound_pass_seconds(choice) + exposed_seconds)
            if seconds > self._queue.first[0]:
                self._queue.push(seconds, chosen.degrees, _LayoutSearch._expand_choice, (choice,))
                return
        self._expand_choice(choice)

    def _bound_pass_seconds(self, choice: CompleteChoice) -> float:
        """Return minimum seconds of the passes, from earlier simulations of the schedule. 0 if
        there are none."""
        if not self.costs.simulations.has_schedule(choice.pipeline):
            return 0.0
        step = choice.step
        return self.costs.simulations.compute_bound(
            choice.pipeline, step.stage_seconds, step.send_seconds
        )

    def _has_capacity_for_deferred(
        self, chosen: PartialChoice, sharding: ShardingChoice, scheduled: ScheduleOption
    ) -> bool:
        """Return True if the passes of a rank that wait for gradients of weights may fit."""
        degrees = chosen.degrees
        load = scheduled.deferring_rank_load
        if load is None:
            return True
        persistent = self.costs.get_persistent_memory(degrees, load, sharding)
        activations = self.costs.compute_deferring_bytes(degrees, chosen.execution, scheduled)
        return self._has_capacity_for_live(degrees, persistent.total_at_loss + activations)

    def _expand_choice(self, choice: CompleteChoice) -> None:
        if self._is_proven(choice.degrees, choice.sharding):
            return
        if self._queue and self.costs.simulations.has_schedule(choice.pipeline):
            seconds = choice.step.predict(self.costs.simulations.compute_bound).step
            if seconds > self._queue.first[0]:
                self._queue.push(seconds, choice.degrees, _LayoutSearch._predict_choice, (choice,))
                return
        self._predict_choice(choice)

    def _predict_choice(self, choice: CompleteChoice) -> None:
        if self._is_proven(choice.degrees, choice.sharding):
            return
        memory = self.costs.find_largest_memory(choice, self.capacity_bytes)
        if not self._has_capacity_for(memory.total):
            return
        self.result.num_predicted += 1
        prediction = self.predictor.predict(
            choice.candidate, memory, choice.step, self.costs.simulations.simulate
        )
        self._table.add(prediction)
        self._queue.push(
            prediction.time.step, choice.degrees, _LayoutSearch._record_proven, (prediction,)
        )

    def _record_proven(self, prediction: Prediction) -> None:
        """Record a prediction that precedes everything left in the queue: the best of its
        key."""
        self._table.prove(prediction)
