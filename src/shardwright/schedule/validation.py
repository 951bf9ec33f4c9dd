"""Check of schedules: complete, ordered and free of deadlock; and their peak activations."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from shardwright.errors import ScheduleError
from shardwright.schedule.actions import Action, Schedule
from shardwright.schedule.transfers import ScheduleStep, Transfer, find_source, plan_steps


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
        ScheduleError: names the first action that is missing, duplicated, out of order, or
            waits forever.
    """
    _check_stages(schedule)
    _check_complete(schedule)
    _check_rows_ordered(schedule)
    steps = plan_steps(schedule)
    _execute(schedule, steps)
    return ScheduleStatistics(
        count_peak_activations(schedule),
        sum(step.sent_transfer is not None for row in steps for step in row),
    )


def count_peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Count the most activations that each rank stores at a time, in micro-batches x stages.

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


def _execute(schedule: Schedule, steps: tuple[tuple[ScheduleStep, ...], ...]) -> None:
    """Execute all rows as the executor does, and raise on deadlock.

    A send completes only once its receive is posted. A channel is a queue: message n is
    delivered when it is sent, its receive is posted, and n - 1 has been delivered.
    """
    sent: dict[tuple[int, int], int] = {}
    posted: dict[tuple[int, int], int] = {}
    done: set[tuple[bool, int, int]] = set()
    positions = [0] * schedule.num_ranks
    ready = deque(range(schedule.num_ranks))

    def is_delivered(transfer: Transfer) -> bool:
        channel = transfer.sender, transfer.receiver
        return min(sent.get(channel, 0), posted.get(channel, 0)) > transfer.sequence_number

    def is_blocked(step: ScheduleStep) -> bool:
        if step.awaited_transfer is not None:
            return not is_delivered(step.awaited_transfer)
        source = find_source(step.action, schedule.num_stages)
        return source is not None and (*source, step.action.micro_batch) not in done

    while ready:
        rank = ready.popleft()
        while positions[rank] < len(steps[rank]):
            step = steps[rank][positions[rank]]
            for transfer in step.posted_receives:
                channel = transfer.sender, transfer.receiver
                posted[channel] = max(posted.get(channel, 0), transfer.sequence_number + 1)
            if is_blocked(step):
                break
            action = step.action
            if action.kind != "W":
                done.add((action.kind == "F", action.stage, action.micro_batch))
            if step.sent_transfer is not None:
                channel = step.sent_transfer.sender, step.sent_transfer.receiver
                assert step.sent_transfer.sequence_number == sent.get(channel, 0), (
                    "a channel's messages are numbered in the order of sending"
                )
                sent[channel] = step.sent_transfer.sequence_number + 1
                ready.append(step.sent_transfer.receiver)
            positions[rank] += 1
    stuck = [rank for rank, position in enumerate(positions) if position < len(steps[rank])]
    if stuck:
        raise _make_error(
            schedule,
            "deadlock: "
            + "; ".join(
                _describe_wait(schedule, steps[rank][positions[rank]].action, rank)
                for rank in stuck
            ),
        )


def _describe_wait(schedule: Schedule, action: Action, rank: int) -> str:
    source = find_source(action, schedule.num_stages)
    assert source is not None
    forward, stage = source
    awaited = (
        f"{stage}F{action.micro_batch}"
        if forward
        else f"{stage}B{action.micro_batch} or {stage}I{action.micro_batch}"
    )
    owner = schedule.rank_of_stage[stage]
    return f"rank {rank} is at {action} and waits for {awaited} of rank {owner}"


def _make_error(schedule: Schedule, problem: str) -> ScheduleError:
    return ScheduleError(f"{schedule.name}: {problem}", field="schedule")
