"""Check of schedules: complete, ordered and free of deadlock; and their peak activations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shardwright.errors import ScheduleError
from shardwright.schedule.actions import Action, Schedule
from shardwright.schedule.communication_graph import build_communication_graph
from shardwright.schedule.transfers import assign_channel_groups, plan_steps


@dataclass(frozen=True)
class ScheduleStatistics:
    """Statistics of a schedule that passed the check.

    Attributes:
        peak_activations: per rank, the most activations stored at a time. The unit is one
            micro-batch on one stage.
        num_transfers: messages of a step, over all ranks.
    """

    peak_activations: tuple[int, ...]
    num_transfers: int


def check_schedule(schedule: Schedule) -> ScheduleStatistics:
    """Check that a schedule is complete and ordered, and that its execution ends.

    Raises:
        ScheduleError: names the first action that is missing, duplicated or out of order, or
            the computations and messages that wait for each other.
    """
    _check_stages(schedule)
    _check_complete(schedule)
    _check_rows_ordered(schedule)
    steps = plan_steps(schedule)
    graph = build_communication_graph(
        schedule, steps, assign_channel_groups(schedule.rank_of_stage)
    )
    circular_wait = graph.find_circular_wait()
    if circular_wait is not None:
        raise _make_error(
            schedule,
            "deadlock: " + "; ".join(circular_wait),
            remedy="Move one of these actions to another place of its rank's row; "
            "`shardwright schedule FILE` checks a file",
        )
    return ScheduleStatistics(
        count_peak_activations(schedule),
        sum(step.sent_transfer is not None for row in steps for step in row),
    )


def count_peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Return the most activations that each rank stores at a time, in micro-batches x stages.

    An activation is stored from its F to its B or, where the backward pass is split, to its W,
    which needs the layers' inputs and the gradients of their outputs.
    """
    peaks = []
    for row in schedule.rows:
        live = peak = 0
        for action in row:
            if action.kind == "F":
                live += 1
                peak = max(peak, live)
            elif action.kind != "I":
                live -= 1
        peaks.append(peak)
    return tuple(peaks)


def _check_stages(schedule: Schedule) -> None:
    """Check that exactly one rank computes each stage."""
    for rank, row in enumerate(schedule.rows):
        for action in row:
            stage_rank = schedule.rank_of_stage[action.stage]
            if stage_rank != rank:
                raise _make_error(
                    schedule,
                    f"rank {rank} computes {action}, but stage {action.stage} is on rank "
                    f"{stage_rank}",
                )
    for stage, stage_rank in enumerate(schedule.rank_of_stage):
        if stage_rank < 0:
            raise _make_error(schedule, f"no rank computes stage {stage} of {schedule.num_stages}")
    for rank, row in enumerate(schedule.rows):
        if not row:
            raise _make_error(schedule, f"rank {rank} computes nothing")


def _check_complete(schedule: Schedule) -> None:
    """Check that every stage runs, for every micro-batch, F and then B or I and W once.

    In evaluation it runs F alone.
    """
    counts = Counter(action for row in schedule.rows for action in row)
    for action, count in counts.items():
        if count > 1:
            raise _make_error(schedule, f"{action} occurs {count} times")
    for stage in range(schedule.num_stages):
        for micro_batch in range(schedule.num_micro_batches):
            kinds = {
                kind for kind in ("F", "B", "I", "W") if Action(kind, stage, micro_batch) in counts
            }
            if "F" not in kinds:
                raise _make_error(schedule, f"{stage}F{micro_batch} is missing")
            if schedule.has_backward and kinds not in ({"F", "B"}, {"F", "I", "W"}):
                pair = f"stage {stage}, micro-batch {micro_batch}"
                raise _make_error(
                    schedule,
                    f"{pair} has {' and '.join(sorted(kinds))}: "
                    "it needs F, and then B alone or both I and W",
                )


def _check_rows_ordered(schedule: Schedule) -> None:
    """Check that on each rank F precedes B or I, and I precedes W."""
    for rank, row in enumerate(schedule.rows):
        seen: set[Action] = set()
        for position, action in enumerate(row):
            prerequisite = (
                None
                if action.kind == "F"
                else action._replace(kind="I" if action.kind == "W" else "F")
            )
            if prerequisite is not None and prerequisite not in seen:
                raise _make_error(
                    schedule,
                    f"on rank {rank}, {action} (number {position + 1}) comes before {prerequisite}",
                )
            seen.add(action)


def _make_error(schedule: Schedule, problem: str, remedy: str | None = None) -> ScheduleError:
    return ScheduleError(f"{schedule.name}: {problem}", field="schedule", remedy=remedy)
