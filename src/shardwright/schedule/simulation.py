"""Simulation of a schedule with given times, predicted or measured.

A rank runs its actions in order, each as soon as its input has arrived. Transfers overlap with
computation; those of one channel (one sender, one receiver) run one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from shardwright.errors import ScheduleError
from shardwright.schedule.actions import Action, ActionKind, Schedule


@dataclass(frozen=True)
class ActionTimes:
    """Seconds (or any one unit) per micro-batch, by stage; B takes as long as I and W together.

    Attributes:
        transfer: per boundary between stages s and s + 1 on different ranks, in either
            direction; one number fewer than stages.
    """

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    transfer: tuple[float, ...]

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward: float = 1.0,
        input_gradient: float = 1.0,
        weight_gradient: float = 1.0,
        transfer: float = 0.0,
    ) -> ActionTimes:
        """Return the same times for all stages."""
        return cls(
            (forward,) * num_stages,
            (input_gradient,) * num_stages,
            (weight_gradient,) * num_stages,
            (transfer,) * (num_stages - 1),
        )


@dataclass(frozen=True)
class Timeline:
    """Start and end of every action, in the unit of the times, by row as in the schedule."""

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @property
    def step_seconds(self) -> float:
        """Time from the first start to the last end, over all ranks."""
        return max(row[-1] for row in self.ends)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Computing time of each rank."""
        return tuple(
            sum(end - start for start, end in zip(starts, ends, strict=True))
            for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @property
    def utilisation(self) -> float:
        """Share of all ranks' time spent computing, 0 to 1."""
        return sum(self.busy_seconds) / (self.schedule.num_ranks * self.step_seconds)

    @property
    def bubble_fraction(self) -> float:
        """Waiting time divided by computing time, over all ranks."""
        return 1.0 / self.utilisation - 1.0


def simulate(
    schedule: Schedule,
    times: ActionTimes | Sequence[ActionTimes] | Mapping[Action, float],
) -> Timeline:
    """Compute the start and end of every action.

    Args:
        times: per stage and kind, of all micro-batches or of each one; or one measured number for
            each action, with no time of transfers.

    Raises:
        ScheduleError: the schedule cannot run to its end.

    >>> from shardwright.schedule import build_schedule
    >>> timeline = simulate(build_schedule("1f1b", 4, 8), ActionTimes.uniform(4))
    >>> timeline.step_seconds, round(timeline.utilisation, 4), timeline.bubble_fraction == 3 / 8
    (33.0, 0.7273, True)
    """
    order = _build_execution_order(schedule)
    durations, transfers = _list_step_times(schedule, order, times)
    rank_free = [0.0] * schedule.num_ranks
    channel_free = [0.0] * order.num_channels
    available = [0.0] * len(order.steps)
    starts: list[list[float]] = [[] for _ in schedule.rows]
    ends: list[list[float]] = [[] for _ in schedule.rows]
    for number, (_, rank, source, channel, _) in enumerate(order.steps):
        start = rank_free[rank]
        if source >= 0 and available[source] > start:
            start = available[source]
        end = rank_free[rank] = start + durations[number]
        starts[rank].append(start)
        ends[rank].append(end)
        if channel >= 0:
            begin = channel_free[channel]
            channel_free[channel] = end = (end if end > begin else begin) + transfers[number]
        available[number] = end
    return Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def simulate_step_seconds(schedule: Schedule, times: ActionTimes) -> float:
    """Compute `simulate(...).step_seconds` without the timeline, for large searches.

    >>> from shardwright.schedule import build_schedule
    >>> simulate_step_seconds(build_schedule("1f1b", 4, 8), ActionTimes.uniform(4))
    33.0
    """
    order = _build_execution_order(schedule)
    durations = _list_slot_times(times)
    rank_free = [0.0] * schedule.num_ranks
    channel_free = [0.0] * order.num_channels
    available: list[float] = []
    boundary_times = times.transfer
    for slot, rank, source, channel, boundary in order.steps:
        start = rank_free[rank]
        if source >= 0 and available[source] > start:
            start = available[source]
        rank_free[rank] = end = start + durations[slot]
        if channel >= 0:
            begin = channel_free[channel]
            channel_free[channel] = end = (end if end > begin else begin) + boundary_times[boundary]
        available.append(end)
    return max(rank_free)


def _list_step_times(
    schedule: Schedule,
    order: _ExecutionOrder,
    times: ActionTimes | Sequence[ActionTimes] | Mapping[Action, float],
) -> tuple[list[float], list[float]]:
    """List the seconds of each step of the order, and of the message that it sends."""
    actions = _list_actions(schedule)
    if isinstance(times, Mapping):
        return [times[action] for action in actions], [0.0] * len(actions)
    if isinstance(times, ActionTimes):
        times = (times,) * schedule.num_micro_batches
    slot_times = list(map(_list_slot_times, times))
    return (
        [
            slot_times[action.micro_batch][slot]
            for action, (slot, *_) in zip(actions, order.steps, strict=True)
        ],
        [
            times[action.micro_batch].transfer[boundary] if channel >= 0 else 0.0
            for action, (*_, channel, boundary) in zip(actions, order.steps, strict=True)
        ],
    )


@lru_cache(maxsize=16)
def _list_actions(schedule: Schedule) -> list[Action]:
    """List the actions of the order. Cached for simulations of many steps, as predictions with the
    rows of data need."""
    rows = list(map(iter, schedule.rows))
    return [next(rows[rank]) for _, rank, *_ in _build_execution_order(schedule).steps]


_get_kind_and_stage = itemgetter(0, 1)

_SLOT_OF_KIND: dict[ActionKind, int] = {"F": 0, "I": 1, "W": 2, "B": 3}


def _list_slot_times(times: ActionTimes) -> tuple[float, ...]:
    """List the times of actions by slot of `_ExecutionOrder.steps`: kind by kind, stage by
    stage.
    """
    backward = tuple(
        i + w for i, w in zip(times.input_gradient, times.weight_gradient, strict=True)
    )
    return (*times.forward, *times.input_gradient, *times.weight_gradient, *backward)


@dataclass(frozen=True)
class _ExecutionOrder:
    """All actions in an order that respects their dependencies, whatever their times. Those of one
    rank follow each other as in its row.

    `steps` has for each action the slot of its time, its rank, the number of the action on
    another stage that it waits for (-1: none), the channel of its message (-1: none) and the
    boundary that the message crosses.
    """

    steps: list[tuple[int, int, int, int, int]]
    num_channels: int


@lru_cache(maxsize=256)
def _build_execution_order(schedule: Schedule) -> _ExecutionOrder:
    rows = schedule.rows
    num_stages = schedule.num_stages
    num_micro_batches = schedule.num_micro_batches
    steps: list[tuple[int, int, int, int, int]] = []
    # Flat indices over (is it a backward pass, stage, micro-batch): number of the action that
    # computes a tensor, and the rank that waits for it.
    num_tensors = 2 * num_stages * num_micro_batches
    action_number = [-1] * num_tensors
    waiting_rank = [-1] * num_tensors
    channels: dict[tuple[int, int], int] = {}
    links = [_list_links(schedule, rank, channels) for rank in range(schedule.num_ranks)]
    positions = [0] * schedule.num_ranks
    ready = deque(range(schedule.num_ranks))
    while ready:
        rank = ready.popleft()
        row = rows[rank]
        rank_links = links[rank]
        for position in range(positions[rank], len(row)):
            kind, stage, micro_batch = row[position]
            slot, first_input, first_output, channel, boundary = rank_links[kind, stage]
            prerequisite = -1
            if first_input >= 0:
                prerequisite = action_number[first_input + micro_batch]
                if prerequisite < 0:
                    waiting_rank[first_input + micro_batch] = rank
                    positions[rank] = position
                    break
            if first_output >= 0:
                output_index = first_output + micro_batch
                action_number[output_index] = len(steps)
                if waiting_rank[output_index] >= 0:
                    ready.append(waiting_rank[output_index])
            steps.append((slot, rank, prerequisite, channel, boundary))
        else:
            positions[rank] = len(row)
    if len(steps) < sum(map(len, rows)):
        raise ScheduleError(
            f"{schedule.name} cannot run to its end; `check` reports why", field="schedule"
        )
    return _ExecutionOrder(steps, len(channels))


def _list_links(
    schedule: Schedule, rank: int, channels: dict[tuple[int, int], int]
) -> dict[tuple[ActionKind, int], tuple[int, int, int, int, int]]:
    """Return for each kind of action and stage of a rank: the slot of its time; the flat indices of
    its input and output for micro-batch 0, -1 if it waits for no other stage and if no action waits
    for it; and channel and boundary of its message, -1 without one. New channels get numbers.
    """
    num_stages = schedule.num_stages
    num_micro_batches = schedule.num_micro_batches
    links = {}
    for kind, stage in set(map(_get_kind_and_stage, schedule.rows[rank])):
        first_input = first_output = channel = boundary = -1
        if kind != "W":
            step = 1 if kind == "F" else -1
            first_output = (stage + num_stages * (kind != "F")) * num_micro_batches
            if 0 <= stage - step < num_stages:
                first_input = first_output - step * num_micro_batches
            target_stage = stage + step
            if 0 <= target_stage < num_stages:
                target_rank = schedule.rank_of_stage[target_stage]
                if target_rank != rank:
                    channel = channels.setdefault((rank, target_rank), len(channels))
                    boundary = min(stage, target_stage)
        slot = _SLOT_OF_KIND[kind] * num_stages + stage
        links[kind, stage] = (slot, first_input, first_output, channel, boundary)
    return links
