"""Micro-batches of a step that repeat earlier ones, and the comparison which shows that they do.

A step with many micro-batches runs the same operators again and again. A rehearsal runs a step with
fewer of them, whose units are those of the whole step without some repeated periods. A unit is a
micro-batch or, under pipeline parallelism, an action of the rank. The whole step's record follows
from that of the shorter step if its last two periods are equal in every change of memory and every
collective, and begin and end with the same live storages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardwright.layout import Layout
from shardwright.offload import ActivationOffload
from shardwright.rehearsal.collective_recorder import Collective, CollectiveRecorder
from shardwright.rehearsal.live_memory import LiveMemoryTracker
from shardwright.schedule import (
    PIPELINE_SCHEDULES,
    Action,
    ScheduleStep,
    load_schedule,
    plan_steps,
)
from shardwright.training.metrics.step_times import StepTimes

_SETTLING_UNITS = 2
"""Units of every computation before the compared periods. The first allocates gradients and sums;
the second frees what the first has left."""


class StepUnit(NamedTuple):
    """Micro-batch or action of a rank's step, as far as its execution depends on it."""

    computation: tuple[str, int]
    """Kind of action and stage."""
    circumstances: Hashable
    """Messages and reductions of the unit, and the action that follows."""
    micro_batch: int

    def shift(self, num_micro_batches: int) -> StepUnit:
        """Return the same unit of a later micro-batch."""
        return self._replace(micro_batch=self.micro_batch + num_micro_batches)


@dataclass(frozen=True)
class ShortenedStep:
    """A rank's step without some of its periods.

    The whole step runs the units `[end - length, end)` of this one `num_omitted` more times before
    it runs the units that follow.
    """

    num_micro_batches: int
    """Micro-batches of this step."""
    end: int
    """Unit before which periods are left out."""
    length: int
    """Units of a period."""
    num_omitted: int
    """Periods that are left out."""


def list_units(layout: Layout, stage_rank: int, num_micro_batches: int) -> list[StepUnit]:
    """List the units of the step of the ranks at an index of axis pp.

    Raises:
        ScheduleError: the schedule does not support this number of micro-batches.
    """
    if layout.pp == 1:
        last = num_micro_batches - 1
        return [StepUnit(("", 0), index == last, index) for index in range(num_micro_batches)]
    schedule = load_schedule(layout.schedule, layout.pp, num_micro_batches, layout.virtual_stages)
    steps = plan_steps(schedule)[stage_rank]
    # The last backward pass of a stage reduces gradients.
    last_of_stage = {
        step.action.stage: index for index, step in enumerate(steps) if step.action.kind != "F"
    }
    last_units = frozenset(last_of_stage.values())
    following = [*(step.action for step in steps[1:]), None]
    return [
        StepUnit(
            (step.action.kind, step.action.stage),
            (index in last_units, _describe_messages(step), _subtract(after, step.action)),
            step.action.micro_batch,
        )
        for index, (step, after) in enumerate(zip(steps, following, strict=True))
    ]


def _describe_messages(step: ScheduleStep) -> Hashable:
    """Describe an action's messages, with micro-batches counted from its own."""
    transfers = (step.awaited_transfer, step.sent_transfer, *step.posted_receives)
    actions = [transfer and transfer.action for transfer in transfers]
    return tuple(
        tuple(_subtract(action, step.action) for action in group)
        for group in (actions, step.completed_sends)
    )


def _subtract(action: Action | None, base: Action) -> Action | None:
    """Count the micro-batches of an action from those of another."""
    return action and action._replace(micro_batch=action.micro_batch - base.micro_batch)


def shorten_step(layout: Layout, stage_rank: int, num_micro_batches: int) -> ShortenedStep | None:
    """Find the shortest step from which the whole one follows; None if there is none.

    Periods are of one micro-batch or, as in interleaved schedules, of one per pipeline rank. GPipe
    has none: it keeps all micro-batches in memory.
    """
    # A file has one number of micro-batches.
    if layout.pp > 1 and (layout.schedule == "gpipe" or layout.schedule not in PIPELINE_SCHEDULES):
        return None
    units = list_units(layout, stage_rank, num_micro_batches)
    least = 1
    if layout.pp > 1:
        least = max(1, PIPELINE_SCHEDULES[layout.schedule].min_micro_batches_per_rank * layout.pp)
    for fewer in range(least, num_micro_batches):
        periods = [
            size for size in sorted({1, layout.pp}) if not (num_micro_batches - fewer) % size
        ]
        if layout.pp > 1 and PIPELINE_SCHEDULES[layout.schedule].has_divisibility_rule:
            periods = [size for size in periods if not fewer % layout.pp]
        if not periods:
            continue
        shorter = list_units(layout, stage_rank, fewer)
        for size in periods:
            found = _match(shorter, units, size, fewer, num_micro_batches)
            if found is not None:
                return found
    return None


def _match(
    shorter: Sequence[StepUnit],
    units: Sequence[StepUnit],
    period: int,
    fewer: int,
    num_micro_batches: int,
) -> ShortenedStep | None:
    """Return how `units` follow from `shorter` by repeats of `period` micro-batches."""
    num_omitted = (num_micro_batches - fewer) // period
    length = (len(units) - len(shorter)) // num_omitted
    pairs = enumerate(zip(shorter, units, strict=False))
    end = next((index for index, (one, other) in pairs if one != other), len(shorter))
    begin = end - 2 * length
    if begin < 0 or not length:
        return None
    body = list(shorter[end - length : end])
    before = [unit.shift(period) for unit in shorter[begin : end - length]]
    inserted = [unit.shift(count * period) for count in range(1, num_omitted + 1) for unit in body]
    rest = [unit.shift(num_omitted * period) for unit in shorter[end:]]
    if before != body or [*shorter[:end], *inserted, *rest] != list(units):
        return None
    settled = Counter(unit.computation for unit in shorter[:begin])
    if any(settled[unit.computation] < _SETTLING_UNITS for unit in body):
        return None
    return ShortenedStep(fewer, end, length, num_omitted)


class UnitMarks(StepTimes):
    """Record of where the units of a rehearsed step end.

    Args:
        layout: Layout of the step.
        live: Tracker of the step's memory.
        recorder: Recorder of the step's collectives.
        offload: Offloading of saved tensors, if there is one.
    """

    def __init__(
        self,
        layout: Layout,
        live: LiveMemoryTracker,
        recorder: CollectiveRecorder,
        offload: ActivationOffload | None,
    ) -> None:
        super().__init__(torch.device("cpu"))
        # Of a micro-batch, or of an action.
        self._last_parts = ("reduction",) if layout.pp == 1 else ("forward", "backward")
        self._live = live
        self._recorder = recorder
        self._offload = offload
        self._ends: list[_UnitEnd] = []

    def mark(self, part: str) -> None:
        """End a unit if this is its last part."""
        super().mark(part)
        if part in self._last_parts:
            self._ends.append(
                _UnitEnd(
                    self._live.num_changes,
                    len(self._recorder.collectives),
                    0 if self._offload is None else self._offload.num_bytes,
                    0 if self._offload is None else self._offload.peak_bytes,
                )
            )

    def extend_collectives(self, step: ShortenedStep) -> tuple[Collective, ...] | None:
        """Return the collectives of the whole step; None if the compared periods differ."""
        first, second, end = (self._ends[step.end - count * step.length - 1] for count in (2, 1, 0))
        live = self._live
        calls = self._recorder.collectives
        body = calls[second.num_collectives : end.num_collectives]
        are_equal = (
            calls[first.num_collectives : second.num_collectives] == body
            and live.list_changes(first.num_changes, second.num_changes)
            == live.list_changes(second.num_changes, end.num_changes)
            and live.count_live_storages(first.num_changes)
            == live.count_live_storages(second.num_changes)
            == live.count_live_storages(end.num_changes)
            and first.offloaded_bytes == second.offloaded_bytes == end.offloaded_bytes
            and second.peak_offloaded_bytes == end.peak_offloaded_bytes
        )
        if not are_equal:
            return None
        rest = calls[end.num_collectives :]
        return (*calls[: end.num_collectives], *body * step.num_omitted, *rest)


@dataclass(frozen=True)
class _UnitEnd:
    """Lengths of a step's record, and bytes outside the device, at the end of a unit."""

    num_changes: int
    num_collectives: int
    offloaded_bytes: int
    peak_offloaded_bytes: int
