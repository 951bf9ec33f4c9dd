"""Schedules by name, with what each asks of ranks, stages and micro-batches; and by file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from shardwright.errors import ScheduleError, nearest
from shardwright.schedule.actions import Action, Schedule, folded, looped
from shardwright.schedule.check import check
from shardwright.schedule.folded import build_dualpipev, build_zbv
from shardwright.schedule.interleaved import build_interleaved_1f1b
from shardwright.schedule.straight import build_1f1b, build_gpipe, build_zb_h1
from shardwright.schedule.text import read_schedule

Rows = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Family:
    """A named schedule. `placement` says which rank holds which stages.

    straight   rank r holds stage r
    looped     v stages a rank, r, r + p, r + 2p, ...
    folded     two stages a rank, r and 2p - 1 - r
    """

    title: str
    placement: Literal["straight", "looped", "folded"]
    build: Callable[[int, int, int], Rows]
    """(ranks, micro-batches, stages per rank) -> rows."""
    splits_backward: bool = False
    rounds: bool = False
    """Micro-batches go in rounds of as many as there are ranks."""
    micro_batches_per_rank: int = 0
    """Fewest micro-batches, as a multiple of the ranks."""


FAMILIES: dict[str, Family] = {
    "gpipe": Family("GPipe", "straight", lambda p, m, v: build_gpipe(p, m)),
    "1f1b": Family("1F1B", "straight", lambda p, m, v: build_1f1b(p, m)),
    "interleaved_1f1b": Family("interleaved 1F1B", "looped", build_interleaved_1f1b, rounds=True),
    "zb_h1": Family("ZB-H1", "straight", lambda p, m, v: build_zb_h1(p, m), splits_backward=True),
    "zbv": Family("ZBV", "folded", lambda p, m, v: build_zbv(p, m), splits_backward=True),
    "dualpipev": Family(
        "DualPipeV", "folded", lambda p, m, v: build_dualpipev(p, m), splits_backward=True, micro_batches_per_rank=2
    ),
}


def stages_per_rank(name: str, virtual_stages: int | None = None) -> int:
    """Stages that each rank holds under a named schedule.

    >>> stages_per_rank("1f1b"), stages_per_rank("interleaved_1f1b"), stages_per_rank("zbv")
    (1, 2, 2)

    Raises:
        ScheduleError: a number of virtual stages that the schedule does not take.
    """
    family = _family(name)
    if family.placement == "looped":
        return virtual_stages or 2
    fixed = 2 if family.placement == "folded" else 1
    if virtual_stages not in (None, fixed):
        raise ScheduleError(
            f"{family.title} holds {fixed} stage{'s' if fixed > 1 else ''} on each rank",
            field="virtual_stages",
            got=virtual_stages,
            allowed=str(fixed),
            remedy="Leave it out, or take interleaved_1f1b",
        )
    return fixed


def rank_of_stage(name: str, num_ranks: int, virtual_stages: int | None = None) -> tuple[int, ...]:
    """The rank that holds each stage, under a named schedule or a file's.

    >>> rank_of_stage("interleaved_1f1b", 2, 2), rank_of_stage("zbv", 2)
    ((0, 1, 0, 1), (0, 1, 1, 0))

    Raises:
        ScheduleError: an unknown name, or a file for another number of ranks.
    """
    if name not in FAMILIES:
        schedule = read_file(name)
        _check_fits(name, "ranks", "layout.pp", num_ranks, schedule.num_ranks)
        return schedule.rank_of_stage
    if FAMILIES[name].placement == "folded":
        return folded(num_ranks)
    return looped(num_ranks, num_ranks * stages_per_rank(name, virtual_stages))


def splits_backward(name: str) -> bool:
    """Whether a named schedule, or a file's, cuts backwards into I and W."""
    return FAMILIES[name].splits_backward if name in FAMILIES else read_file(name).splits_backward


@lru_cache(maxsize=256)
def build_schedule(name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int | None = None) -> Schedule:
    """A named schedule for p ranks and m micro-batches.

    Args:
        virtual_stages: stages per rank, for interleaved_1f1b; default 2.

    Raises:
        ScheduleError: numbers that the schedule does not take, with the nearest that it does.

    >>> print(build_schedule("zbv", 4, 8))
    ZBV: 4 ranks, 8 stages, 8 micro-batches
    """
    family, stages = _family(name), stages_per_rank(name, virtual_stages)
    for number, what in ((num_ranks, "ranks"), (num_micro_batches, "micro_batches")):
        if number < 1:
            raise ScheduleError("at least one is needed", field=what, got=number)
    if family.rounds and num_micro_batches % num_ranks:
        below, above = num_micro_batches // num_ranks * num_ranks, -(-num_micro_batches // num_ranks) * num_ranks
        raise ScheduleError(
            f"{family.title} sends micro-batches round in groups of {num_ranks}, one per rank, "
            f"and {num_micro_batches} is no multiple of {num_ranks}",
            field="micro_batches",
            got=num_micro_batches,
            allowed=f"{below} or {above}" if below else str(above),
            remedy="Change gradient_accumulation_steps, or take 1f1b or zbv, which want no multiple",
        )
    if num_micro_batches < family.micro_batches_per_rank * num_ranks:
        raise ScheduleError(
            f"{family.title} needs {family.micro_batches_per_rank} micro-batches per rank to fill {num_ranks} ranks both ways",
            field="micro_batches",
            got=num_micro_batches,
            allowed=f"{family.micro_batches_per_rank * num_ranks} or more",
            remedy="Raise gradient_accumulation_steps, or take zbv, which runs with any number",
        )
    return Schedule(family.title, family.build(num_ranks, num_micro_batches, stages))


def load_schedule(name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int | None = None) -> Schedule:
    """The schedule that a layout names: one of `FAMILIES`, or a file. What comes from a file is proven first.

    Raises:
        ScheduleError: an unknown name, or a schedule that does not fit the ranks and micro-batches or cannot run.
    """
    if name in FAMILIES:
        return build_schedule(name, num_ranks, num_micro_batches, virtual_stages)
    schedule = read_file(name)
    field = "training.gradient_accumulation_steps"
    _check_fits(name, "ranks", "layout.pp", num_ranks, schedule.num_ranks)
    _check_fits(name, "micro-batches", field, num_micro_batches, schedule.num_micro_batches)
    return schedule


def _check_fits(name: str, what: str, field: str, got: int, wanted: int) -> None:
    if got != wanted:
        raise ScheduleError(f"{name} is written for {wanted} {what}", field=field, got=got, allowed=str(wanted))


def read_file(name: str) -> Schedule:
    """A schedule from a file, proven complete, ordered and free of deadlock.

    Raises:
        ScheduleError: no such file, or a schedule that cannot run.
    """
    path = Path(name)
    if not path.is_file():
        _family(name)
    schedule = read_schedule(path)
    check(schedule)
    return schedule


def _family(name: str) -> Family:
    if name not in FAMILIES:
        near = nearest(name.lower().replace("-", "_"), FAMILIES)
        raise ScheduleError(
            "no schedule of this name, and no file either",
            field="schedule",
            got=name,
            allowed=", ".join(FAMILIES) + ", or a file",
            remedy=f"Did you mean {near}?" if near else None,
        )
    return FAMILIES[name]
