"""Simulated seconds of a pipeline's passes, and lower bounds from earlier simulations of a search.

Simulates the schedule that will run (`shardwright.schedule`). With many micro-batches its steady
state repeats: such a schedule is extrapolated from two shorter ones by the time of one
additional round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from shardwright.planner.time.pipeline import PipelineStages, load_cached_schedule
from shardwright.schedule import (
    ActionTimes,
    simulate,
    simulate_step_seconds,
)

_SINGLE_STAGE_ROUNDS = (2, 3)
_VIRTUAL_STAGE_ROUNDS = (4, 6)
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


def simulate_pipeline(
    pipeline: PipelineStages, seconds: Sequence[StageSeconds], send_seconds: float
) -> float:
    """Return seconds from the first forward to the last backward pass. `seconds` are per kind
    of stage (`PipelinePartition.stage_kinds`)."""
    return simulate_stages(
        pipeline, tuple(seconds[kind] for kind in pipeline.partition.kind_of_stage), send_seconds
    )


def simulate_stages(
    pipeline: PipelineStages, seconds: Sequence[StageSeconds], send_seconds: float
) -> float:
    """Return the same as `simulate_pipeline`, with `seconds` per stage."""
    if pipeline.num_ranks == 1:
        return pipeline.num_micro_batches * sum(stage.total for stage in seconds)
    schedule = (
        pipeline.schedule,
        pipeline.num_ranks,
        pipeline.num_micro_batches,
        pipeline.virtual_stages,
    )
    return _simulate_schedule(*schedule, tuple(seconds), send_seconds)


def simulate_micro_batches(
    pipeline: PipelineStages, micro_batches: Sequence[tuple[Sequence[StageSeconds], float]]
) -> float:
    """Return the same for micro-batches that differ: of each, the arguments `seconds` and
    `send_seconds` of `simulate_pipeline`. Simulates all of them, and extrapolates nothing."""
    schedule = load_cached_schedule(
        pipeline.schedule, pipeline.num_ranks, pipeline.num_micro_batches, pipeline.virtual_stages
    )
    kind_of_stage = pipeline.partition.kind_of_stage
    return simulate(
        schedule,
        [
            _build_action_times([seconds[kind] for kind in kind_of_stage], send_seconds)
            for seconds, send_seconds in micro_batches
        ],
    ).step_seconds


@lru_cache(maxsize=4096)
def _simulate_schedule(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    virtual_stages: int | None,
    seconds: tuple[StageSeconds, ...],
    send_seconds: float,
) -> float:
    """Simulate a schedule. Cached, because layouts that differ only in ZeRO often have the same
    times."""
    times = _build_action_times(seconds, send_seconds)
    return _extrapolate(
        lambda micro_batches: simulate_step_seconds(
            load_cached_schedule(name, num_ranks, micro_batches, virtual_stages), times
        ),
        num_ranks,
        num_micro_batches,
        has_one_stage_per_rank=len(seconds) == num_ranks,
    )


def _build_action_times(seconds: Sequence[StageSeconds], send_seconds: float) -> ActionTimes:
    return ActionTimes(
        tuple(stage.forward for stage in seconds),
        tuple(stage.backward - stage.weight_gradient for stage in seconds),
        tuple(stage.weight_gradient for stage in seconds),
        (send_seconds,) * (len(seconds) - 1),
    )


class SimulationHistory:
    """Latest simulations of a search, per schedule and partition: seconds of the kinds of stages,
    of a send, and of the step. A search has its own, so that no result depends on earlier ones."""

    def __init__(self) -> None:
        self._simulations: dict[
            tuple[object, ...], deque[tuple[tuple[StageSeconds, ...], float, float]]
        ] = {}

    def simulate(
        self, pipeline: PipelineStages, seconds: Sequence[StageSeconds], send_seconds: float
    ) -> float:
        """Return `simulate_pipeline` and record it."""
        makespan = simulate_pipeline(pipeline, seconds, send_seconds)
        if pipeline.num_ranks > 1:
            self._simulations.setdefault(
                _build_schedule_key(pipeline), deque(maxlen=_MAX_SIMULATIONS)
            ).append((tuple(seconds), send_seconds, makespan))
        return makespan

    def has_schedule(self, pipeline: PipelineStages) -> bool:
        """Return True if an earlier simulation has the pipeline's schedule and partition."""
        return pipeline.num_ranks > 1 and _build_schedule_key(pipeline) in self._simulations

    def compute_bound(
        self, pipeline: PipelineStages, seconds: Sequence[StageSeconds], send_seconds: float
    ) -> float:
        """Return a lower bound of `simulate_pipeline`, from earlier simulations of the same
        schedule. 0 if there are none.

        A step's time grows with every pass and scales with all of them: if each part is at least a
        share of its earlier value, so is the step.
        """
        if pipeline.num_ranks == 1:
            return 0.0
        best = 0.0
        for earlier_seconds, earlier_send, makespan in self._simulations.get(
            _build_schedule_key(pipeline), ()
        ):
            share = send_seconds / earlier_send if earlier_send > 0 else float("inf")
            for now, earlier in zip(seconds, earlier_seconds, strict=True):
                # A schedule may split the backward pass: both parts must be at least the share.
                earlier_inputs = earlier[1] - earlier[2]
                share = min(
                    share,
                    now[0] / earlier[0],
                    now[2] / earlier[2] if earlier[2] else share,
                    # Frozen stages have no gradients of inputs.
                    (now[1] - now[2]) / earlier_inputs if earlier_inputs else share,
                )
                if share * makespan <= best:
                    break
            else:
                best = share * makespan
        return best


_MAX_SIMULATIONS = 12
"""Simulations per schedule and partition that a search compares with."""


def _build_schedule_key(pipeline: PipelineStages) -> tuple[object, ...]:
    partition = pipeline.partition
    return (
        pipeline.schedule,
        pipeline.num_ranks,
        pipeline.num_micro_batches,
        pipeline.virtual_stages,
        partition.kind_of_stage,
    )


def _extrapolate(
    measure: Callable[[int], float],
    num_ranks: int,
    num_micro_batches: int,
    *,
    has_one_stage_per_rank: bool,
) -> float:
    """Extrapolate a quantity that grows linearly with rounds of micro-batches, from two
    schedules in steady state."""
    short, long = (
        rounds * num_ranks
        for rounds in (_SINGLE_STAGE_ROUNDS if has_one_stage_per_rank else _VIRTUAL_STAGE_ROUNDS)
    )
    rest = num_micro_batches % num_ranks
    if num_micro_batches <= long + rest:
        return measure(num_micro_batches)
    # Both have the same remainder of a round, so that their end equals the end of this
    # schedule.
    low = measure(short + rest)
    high = measure(long + rest)
    return low + (high - low) / (long - short) * (num_micro_batches - short - rest)
