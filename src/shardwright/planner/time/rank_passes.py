"""Moments of a pipeline rank's row of a schedule in which most is in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from operator import ge
from typing import TypeVar

from shardwright.planner.memory.stage_load import BackwardMoment, RankPass
from shardwright.schedule import Action
from shardwright.schedule.transfers import LOOKAHEAD

_Moment = TypeVar("_Moment", BackwardMoment, RankPass)


def list_rank_moments(
    row: Sequence[Action], rank_of_stage: Sequence[int]
) -> tuple[BackwardMoment, ...]:
    """Return the backward passes of a row during which most is in memory. No other pass of the same
    kind, with as many layers that stay, has at least as much of everything."""
    num_stages = len({action.stage for action in row})
    last_stage = len(rank_of_stage) - 1
    is_linked = _find_links(rank_of_stage)
    num_early = _count_early_messages(row, is_linked)
    num_saved = num_deferred = num_messages = num_losses = 0
    last: tuple[int, int] | None = None
    """Stage and micro-batch of the latest forward pass, until its own backward pass."""
    stages_with_gradients: set[int] = set()
    found: set[tuple[float, float, int, float, int, int, bool]] = set()
    for index, (kind, stage, micro_batch) in enumerate(row):
        num_own_messages = 1 + is_linked[stage]  # input, and output or the last norm's input
        if kind == "F":
            num_saved += 1
            num_messages += num_own_messages
            num_losses += stage == last_stage
            last = (stage, micro_batch)
            continue
        is_deferring = kind == "I"
        if not is_deferring:
            stages_with_gradients.add(stage)
        if kind == "W":
            num_deferred -= 1
            continue
        num_saved -= 1
        num_messages -= num_own_messages
        num_losses -= stage == last_stage
        last = None if last == (stage, micro_batch) else last
        found.add(
            (
                num_saved / num_stages,
                num_deferred / num_stages,
                int(last is not None),
                len(stages_with_gradients) / num_stages,
                num_messages + is_linked[stage] + (stage < last_stage) + num_early[index],
                num_losses,
                is_deferring,
            )
        )
        num_deferred += is_deferring
    return _select_largest(
        map(BackwardMoment._make, found),
        get_kind=lambda moment: (moment.num_staying, moment.is_deferring),
        has_all=lambda one, other: all(map(ge, one, other)),
    )


def _find_links(rank_of_stage: Sequence[int]) -> list[bool]:
    """Return True where another rank sends a stage's input, and at its index + 1 the gradient of
    its output."""
    return [False, *(one != other for one, other in pairwise(rank_of_stage)), False]


def _count_early_messages(row: Sequence[Action], is_linked: Sequence[bool]) -> list[int]:
    """Count the messages that are being received for later actions while each one runs."""
    received = [kind != "W" and is_linked[stage + (kind != "F")] for kind, stage, _ in row]
    return [sum(received[index + 1 : index + 1 + LOOKAHEAD]) for index in range(len(row))]


def list_rank_passes(row: Sequence[Action], rank_of_stage: Sequence[int]) -> tuple[RankPass, ...]:
    """Return the passes of a row during which most is in memory: no other pass of the same kind
    through the same stage has at least as much of everything. Last passes are a kind of their own.

    GPipe with two micro-batches saves both before its first backward pass:

    >>> from shardwright.schedule.registry import build_schedule_row
    >>> [(each.kind, each.num_saved) for each in list_rank_passes(
    ...     build_schedule_row("gpipe", 2, 2, None, 0), (0, 1))]
    [('B', (1,)), ('B', (0,)), ('F', (1,))]
    """
    stages = sorted({action.stage for action in row})
    place = {stage: index for index, stage in enumerate(stages)}
    saved = [0] * len(stages)
    deferred = [0] * len(stages)
    with_gradients = [False] * len(stages)
    num_early = _count_early_messages(row, _find_links(rank_of_stage))
    num_backward = Counter(stage for kind, stage, _ in row if kind in ("B", "I"))
    found: set[RankPass] = set()
    for index, (kind, stage, _) in enumerate(row):
        own = place[stage]
        if kind == "W":
            with_gradients[own] = True
            deferred[own] -= 1
            continue
        saved[own] -= kind != "F"
        is_last = kind != "F" and num_backward[stage] == 1
        num_backward[stage] -= kind != "F"
        in_memory = (tuple(saved), tuple(deferred), tuple(with_gradients), (num_early[index],))
        found.add(RankPass(kind, own, is_last, *in_memory))
        saved[own] += kind == "F"
        deferred[own] += kind == "I"
        with_gradients[own] |= kind == "B"
    return _select_largest(
        found,
        get_kind=lambda each: each[:3],
        has_all=lambda one, other: all(map(_has_all, one[3:], other[3:])),
    )


def _select_largest(
    items: Iterable[_Moment],
    get_kind: Callable[[_Moment], Hashable],
    has_all: Callable[[_Moment, _Moment], bool],
) -> tuple[_Moment, ...]:
    """Select the items of which no other of the same kind has at least as much of everything, in
    ascending order."""
    largest: list[_Moment] = []
    for each in sorted(items, reverse=True):  # one with at least as much of everything precedes
        if not any(get_kind(one) == get_kind(each) and has_all(one, each) for one in largest):
            largest.append(each)
    return tuple(reversed(largest))


def _has_all(numbers: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return all(map(ge, numbers, others))
