"""When everything happens: a schedule walked under given times, predicted ones or measured ones.

A rank computes its actions in order, each as soon as what it waits for has arrived. Transfers pass beside the computing; those of
a channel (one sender, one receiver) pass one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardwright.errors import ScheduleError
from shardwright.schedule.actions import Action, Kind, Schedule


@dataclass(frozen=True)
class Times:
    """Seconds (or any one unit) of one micro-batch, a number per stage; B takes I and W together.

    Attributes:
        transfer: per border between stages s and s + 1 that lie on different ranks, either way; one number fewer than stages.
    """

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    transfer: tuple[float, ...]

    @classmethod
    def uniform(
        cls, num_stages: int, forward: float = 1.0, input_gradient: float = 1.0, weight_gradient: float = 1.0, transfer: float = 0.0
    ) -> Times:
        """All stages alike."""
        return cls(
            (forward,) * num_stages,
            (input_gradient,) * num_stages,
            (weight_gradient,) * num_stages,
            (transfer,) * (num_stages - 1),
        )

    def of(self, action: Action) -> float:
        """What an action takes."""
        stage = action.stage
        if action.kind == "F":
            return self.forward[stage]
        if action.kind == "I":
            return self.input_gradient[stage]
        if action.kind == "W":
            return self.weight_gradient[stage]
        return self.input_gradient[stage] + self.weight_gradient[stage]


@dataclass(frozen=True)
class Timeline:
    """Start and end of every action, in the unit of the times, row by row as in `schedule.rows`."""

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]

    @property
    def step_seconds(self) -> float:
        """From the first start to the last end, over all ranks."""
        return max(row[-1] for row in self.ends)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Computing on each rank."""
        return tuple(
            sum(end - start for start, end in zip(starts, ends, strict=True))
            for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @property
    def utilisation(self) -> float:
        """Share of all ranks' time that is computing, 0 to 1."""
        return sum(self.busy_seconds) / (self.schedule.num_ranks * self.step_seconds)

    @property
    def bubble(self) -> float:
        """Waiting over computing, all ranks together: what the step takes beyond its work, as a share of that work."""
        return 1.0 / self.utilisation - 1.0


def simulate(schedule: Schedule, times: Times | Mapping[Action, float], transfer: Sequence[float] | None = None) -> Timeline:
    """Start and end of every action.

    Args:
        times: per stage and kind, or one number for each action, as measured.
        transfer: with measured times, what each border between stages takes; default nothing.

    Raises:
        ScheduleError: the schedule cannot run to its end.

    >>> from shardwright.schedule import build_schedule
    >>> timeline = simulate(build_schedule("1f1b", 4, 8), Times.uniform(4))
    >>> timeline.step_seconds, round(timeline.utilisation, 4), timeline.bubble == 3 / 8
    (33.0, 0.7273, True)
    """
    walk = _walk_of(schedule)
    borders: Sequence[float]
    if isinstance(times, Times):
        by_slot = _by_slot(times)
        durations = [by_slot[slot] for slot, *_ in walk.steps]
        borders = times.transfer
    else:
        durations = [times[action] for action in walk.actions]
        borders = transfer or (0.0,) * (schedule.num_stages - 1)
    free = [0.0] * schedule.num_ranks
    passing = [0.0] * walk.num_channels
    arrival = [0.0] * len(walk.actions)
    starts: list[list[float]] = [[] for _ in schedule.rows]
    ends: list[list[float]] = [[] for _ in schedule.rows]
    for number, (_, rank, source, channel, border) in enumerate(walk.steps):
        start = free[rank]
        if source >= 0 and arrival[source] > start:
            start = arrival[source]
        end = free[rank] = start + durations[number]
        starts[rank].append(start)
        ends[rank].append(end)
        if channel >= 0:
            begin = passing[channel]
            passing[channel] = end = (end if end > begin else begin) + borders[border]
        arrival[number] = end
    return Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def seconds_of_step(schedule: Schedule, times: Times) -> float:
    """`simulate(...).step_seconds` without the timeline: a planner asks it of hundreds of schedules.

    >>> from shardwright.schedule import build_schedule
    >>> seconds_of_step(build_schedule("1f1b", 4, 8), Times.uniform(4))
    33.0
    """
    walk = _walk_of(schedule)
    durations = _by_slot(times)
    free = [0.0] * schedule.num_ranks
    passing = [0.0] * walk.num_channels
    arrival: list[float] = []
    borders = times.transfer
    for slot, rank, source, channel, border in walk.steps:
        start = free[rank]
        if source >= 0 and arrival[source] > start:
            start = arrival[source]
        free[rank] = end = start + durations[slot]
        if channel >= 0:
            begin = passing[channel]
            passing[channel] = end = (end if end > begin else begin) + borders[border]
        arrival.append(end)
    return max(free)


_SLOTS: dict[Kind, int] = {"F": 0, "I": 1, "W": 2, "B": 3}


def _by_slot(times: Times) -> tuple[float, ...]:
    """What an action takes, by `_Walk.steps`' slot: kind by kind, stage by stage."""
    whole = tuple(i + w for i, w in zip(times.input_gradient, times.weight_gradient, strict=True))
    return (*times.forward, *times.input_gradient, *times.weight_gradient, *whole)


@dataclass(frozen=True)
class _Walk:
    """All actions in an order in which each comes after what it waits for; no time changes it.

    `steps`: per action the slot of its time, its rank, the number of the action of another stage that it waits for (-1: none), the
    channel that it sends on (-1: none) and the border that its message passes.
    """

    actions: tuple[Action, ...]
    steps: tuple[tuple[int, int, int, int, int], ...]
    num_channels: int


@lru_cache(maxsize=256)
def _walk_of(schedule: Schedule) -> _Walk:
    rows, holders, num_stages, num = schedule.rows, schedule.rank_of_stage, schedule.num_stages, schedule.num_micro_batches
    actions: list[Action] = []
    steps: list[tuple[int, int, int, int, int]] = []
    # By (is it a backward, stage, micro-batch), flat: the number of the action that makes it, and the rank that waits for it.
    backwards = num_stages * num
    done, waiting = [-1] * (2 * backwards), [-1] * (2 * backwards)
    channels: dict[tuple[int, int], int] = {}
    at = [0] * schedule.num_ranks
    ready = deque(range(schedule.num_ranks))
    while ready:
        rank = ready.popleft()
        row = rows[rank]
        for place in range(at[rank], len(row)):
            action = row[place]
            kind, stage, micro_batch = action
            channel = border = before = -1
            if kind != "W":
                forward = kind == "F"
                made = stage * num + micro_batch + (0 if forward else backwards)
                to = stage + 1 if forward else stage - 1
                if stage > 0 if forward else stage < num_stages - 1:
                    needed = made - num if forward else made + num
                    before = done[needed]
                    if before < 0:
                        waiting[needed] = rank
                        at[rank] = place
                        break
                if 0 <= to < num_stages and holders[to] != rank:
                    channel = channels.setdefault((rank, holders[to]), len(channels))
                    border = min(stage, to)
                done[made] = len(actions)
                if waiting[made] >= 0:
                    ready.append(waiting[made])
            actions.append(action)
            steps.append((_SLOTS[kind] * num_stages + stage, rank, before, channel, border))
        else:
            at[rank] = len(row)
    if len(actions) < sum(map(len, rows)):
        raise ScheduleError(f"{schedule.name}: it cannot run to its end; `check` says why", field="schedule")
    return _Walk(tuple(actions), tuple(steps), len(channels))
