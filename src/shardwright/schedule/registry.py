"""Named schedules, their limits on ranks, stages and micro-batches; and schedules from files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from shardwright.errors import ScheduleError, find_closest_name
from shardwright.schedule.actions import (
    Action,
    Schedule,
    assign_folded_stages,
    assign_looped_stages,
)
from shardwright.schedule.builders import (
    build_1f1b_row,
    build_dualpipev_row,
    build_gpipe_row,
    build_interleaved_1f1b_row,
    build_zb_h1_row,
    build_zbv_row,
)
from shardwright.schedule.text_format import read_schedule
from shardwright.schedule.validation import check_schedule
from shardwright.units import format_items

ActionRow = tuple[Action, ...]


@dataclass(frozen=True)
class ScheduleFamily:
    """A named schedule; `stage_assignment` is its assignment of stages to ranks.

    straight   rank r holds stage r
    looped     v stages per rank: r, r + p, r + 2p, ...
    folded     two stages per rank: r and 2p - 1 - r
    """

    title: str
    stage_assignment: Literal["straight", "looped", "folded"]
    build_row: Callable[[int, int, int, int], ActionRow]
    """(rank, ranks, micro-batches, stages per rank) -> actions of the rank."""
    has_split_backward: bool = False
    has_divisibility_rule: bool = False
    """True if the micro-batches must be a multiple of the ranks."""
    min_micro_batches_per_rank: int = 0
    """Fewest micro-batches, as a multiple of the ranks."""


PIPELINE_SCHEDULES: dict[str, ScheduleFamily] = {
    "gpipe": ScheduleFamily("GPipe", "straight", lambda r, p, m, v: build_gpipe_row(r, p, m)),
    "1f1b": ScheduleFamily("1F1B", "straight", lambda r, p, m, v: build_1f1b_row(r, p, m)),
    "interleaved_1f1b": ScheduleFamily(
        "interleaved 1F1B", "looped", build_interleaved_1f1b_row, has_divisibility_rule=True
    ),
    "zb_h1": ScheduleFamily(
        "ZB-H1",
        "straight",
        lambda r, p, m, v: build_zb_h1_row(r, p, m),
        has_split_backward=True,
    ),
    "zbv": ScheduleFamily(
        "ZBV", "folded", lambda r, p, m, v: build_zbv_row(r, p, m), has_split_backward=True
    ),
    "dualpipev": ScheduleFamily(
        "DualPipeV",
        "folded",
        lambda r, p, m, v: build_dualpipev_row(r, p, m),
        has_split_backward=True,
        min_micro_batches_per_rank=2,
    ),
}


def count_stages_per_rank(name: str, virtual_stages: int | None = None) -> int:
    """Return the number of stages of each rank under a named schedule.

    >>> [count_stages_per_rank(name) for name in ("1f1b", "interleaved_1f1b", "zbv")]
    [1, 2, 2]

    Raises:
        ScheduleError: the schedule does not support this number of virtual stages.
    """
    family = _get_family(name)
    if family.stage_assignment == "looped":
        return virtual_stages or 2
    fixed = 2 if family.stage_assignment == "folded" else 1
    if virtual_stages not in (None, fixed):
        raise ScheduleError(
            f"{family.title} holds {format_items(fixed, 'stage')} on each rank",
            field="virtual_stages",
            got=virtual_stages,
            allowed=str(fixed),
            remedy="Omit virtual_stages, or use interleaved_1f1b",
        )
    return fixed


def assign_stages(name: str, num_ranks: int, virtual_stages: int | None = None) -> tuple[int, ...]:
    """Return the rank of each stage under a named schedule or one from a file.

    >>> assign_stages("interleaved_1f1b", 2, 2), assign_stages("zbv", 2)
    ((0, 1, 0, 1), (0, 1, 1, 0))

    Raises:
        ScheduleError: an unknown name, or a file for another number of ranks.
    """
    if name not in PIPELINE_SCHEDULES:
        return _load_for_ranks(name, num_ranks).rank_of_stage
    if PIPELINE_SCHEDULES[name].stage_assignment == "folded":
        return assign_folded_stages(num_ranks)
    return assign_looped_stages(num_ranks, num_ranks * count_stages_per_rank(name, virtual_stages))


def count_micro_batches(name: str, num_ranks: int, at_least: int) -> int:
    """Return the fewest micro-batches that a schedule runs, `at_least` so many if it has a choice.

    A schedule from a file runs one number.

    >>> [count_micro_batches(name, 2, 3) for name in ("1f1b", "interleaved_1f1b", "dualpipev")]
    [3, 4, 4]

    Raises:
        ScheduleError: an unknown name, or a file for another number of ranks.
    """
    if name not in PIPELINE_SCHEDULES:
        return _load_for_ranks(name, num_ranks).num_micro_batches
    family = PIPELINE_SCHEDULES[name]
    number = max(at_least, family.min_micro_batches_per_rank * num_ranks)
    return -(-number // num_ranks) * num_ranks if family.has_divisibility_rule else number


def has_split_backward(name: str) -> bool:
    """True if a schedule, by name or from a file, splits backward passes into I and W."""
    return (
        PIPELINE_SCHEDULES[name].has_split_backward
        if name in PIPELINE_SCHEDULES
        else load_schedule_file(name).has_split_backward
    )


@lru_cache(maxsize=256)
def build_schedule(
    name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int | None = None
) -> Schedule:
    """Build a named schedule for p ranks and m micro-batches.

    Args:
        virtual_stages: stages per rank, for interleaved_1f1b; default 2.

    Raises:
        ScheduleError: unsupported numbers; names the nearest supported ones.

    >>> print(build_schedule("zbv", 4, 8))
    ZBV: 4 ranks, 8 stages, 8 micro-batches
    """
    family, stages = check_numbers(name, num_ranks, num_micro_batches, virtual_stages)
    return Schedule(
        family.title,
        tuple(
            family.build_row(rank, num_ranks, num_micro_batches, stages)
            for rank in range(num_ranks)
        ),
    )


def check_numbers(
    name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int | None
) -> tuple[ScheduleFamily, int]:
    """Return the family of a named schedule and its stages per rank.

    Raises:
        ScheduleError: unsupported numbers; names the nearest supported ones.
    """
    family = _get_family(name)
    stages = count_stages_per_rank(name, virtual_stages)
    for number, name_of_number in ((num_ranks, "ranks"), (num_micro_batches, "micro_batches")):
        if number < 1:
            raise ScheduleError("must be at least one", field=name_of_number, got=number)
    if family.has_divisibility_rule and num_micro_batches % num_ranks:
        below = num_micro_batches // num_ranks * num_ranks
        above = -(-num_micro_batches // num_ranks) * num_ranks
        raise ScheduleError(
            f"{family.title} runs micro-batches in groups of {num_ranks}, one per rank, "
            f"and {num_micro_batches} is not a multiple of {num_ranks}",
            field="micro_batches",
            got=num_micro_batches,
            allowed=f"{below} or {above}" if below else str(above),
            remedy="Change gradient_accumulation_steps, or use 1f1b or zbv, which need no multiple",
        )
    if num_micro_batches < family.min_micro_batches_per_rank * num_ranks:
        raise ScheduleError(
            f"{family.title} needs {family.min_micro_batches_per_rank} micro-batches per rank to "
            f"fill {num_ranks} ranks in both directions",
            field="micro_batches",
            got=num_micro_batches,
            allowed=f"{family.min_micro_batches_per_rank * num_ranks} or more",
            remedy="Raise gradient_accumulation_steps, or use zbv, which runs with any number",
        )
    return family, stages


def build_schedule_row(
    name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int | None, rank: int
) -> ActionRow:
    """Build the actions of one rank of a named schedule, without those of the others."""
    family, stages = check_numbers(name, num_ranks, num_micro_batches, virtual_stages)
    return family.build_row(rank, num_ranks, num_micro_batches, stages)


def load_schedule(
    name: str, num_ranks: int, num_micro_batches: int, virtual_stages: int | None = None
) -> Schedule:
    """Load the schedule that a layout names: one of `PIPELINE_SCHEDULES`, or a file, which is
    checked.

    Raises:
        ScheduleError: an unknown name, or a schedule that does not fit the ranks and
            micro-batches or cannot run.
    """
    if name in PIPELINE_SCHEDULES:
        return build_schedule(name, num_ranks, num_micro_batches, virtual_stages)
    schedule = _load_for_ranks(name, num_ranks)
    field = "training.gradient_accumulation_steps"
    _check_fits(name, "micro-batches", field, num_micro_batches, schedule.num_micro_batches)
    return schedule


def _load_for_ranks(name: str, num_ranks: int) -> Schedule:
    schedule = load_schedule_file(name)
    _check_fits(name, "ranks", "layout.pp", num_ranks, schedule.num_ranks)
    return schedule


def _check_fits(name: str, noun: str, field: str, got: int, expected: int) -> None:
    if got != expected:
        raise ScheduleError(
            f"{name} is written for {expected} {noun}", field=field, got=got, allowed=str(expected)
        )


def load_schedule_file(name: str) -> Schedule:
    """Read a schedule from a file and check that it is complete, ordered and free of deadlock.

    Raises:
        ScheduleError: no such file, or a schedule that cannot run.
    """
    path = Path(name)
    if not path.is_file():
        _get_family(name)
    schedule = read_schedule(path)
    check_schedule(schedule)
    return schedule


def _get_family(name: str) -> ScheduleFamily:
    if name not in PIPELINE_SCHEDULES:
        closest = find_closest_name(name.lower().replace("-", "_"), PIPELINE_SCHEDULES)
        raise ScheduleError(
            "neither a known schedule nor a file",
            field="schedule",
            got=name,
            allowed=", ".join(PIPELINE_SCHEDULES) + ", or a file",
            remedy=f"Did you mean {closest}?" if closest else None,
        )
    return PIPELINE_SCHEDULES[name]
