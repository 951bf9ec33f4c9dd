"""Proof that a schedule can run: complete, in order, without deadlock; and how many activations it keeps at most."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from shardwright.errors import ScheduleError
from shardwright.schedule.actions import Action, Schedule
from shardwright.schedule.transfers import Step, Transfer, plan_steps, source_of


@dataclass(frozen=True)
class Proof:
    """What the check found.

    Attributes:
        peak_activations: per rank, the most activations kept at a time. The unit is one micro-batch on one stage.
        num_transfers: messages of a step, all ranks together.
    """

    peak_activations: tuple[int, ...]
    num_transfers: int


def check(schedule: Schedule) -> Proof:
    """Prove that a schedule is complete and ordered, and that the executor's walk through it ends.

    Raises:
        ScheduleError: names the first action that is missing, doubled, out of order, or waited for in vain.
    """
    _check_stages(schedule)
    _check_complete(schedule)
    _check_rows_ordered(schedule)
    steps = plan_steps(schedule)
    _walk(schedule, steps)
    return Proof(peak_activations(schedule), sum(step.sends is not None for row in steps for step in row))


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """The most activations that each rank keeps, in micro-batches x stages.

    One is kept from its F to its B; where the backward is split to its W, which needs the layers' inputs and the gradients of
    their outputs.
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
    """Every stage is computed by one rank."""
    for rank, row in enumerate(schedule.rows):
        for action in row:
            holder = schedule.rank_of_stage[action.stage]
            if holder != rank:
                raise _error(schedule, f"rank {rank} computes {action}, but stage {action.stage} is on rank {holder}")
    for stage, holder in enumerate(schedule.rank_of_stage):
        if holder < 0:
            raise _error(schedule, f"no rank computes stage {stage} of {schedule.num_stages}")
    for rank, row in enumerate(schedule.rows):
        if not row:
            raise _error(schedule, f"rank {rank} computes nothing")


def _check_complete(schedule: Schedule) -> None:
    """Every stage does F once for every micro-batch, and B once or I and W once each; or, in evaluation, F alone."""
    counts = Counter(action for row in schedule.rows for action in row)
    for action, count in counts.items():
        if count > 1:
            raise _error(schedule, f"{action} stands there {count} times")
    for stage in range(schedule.num_stages):
        for micro_batch in range(schedule.num_micro_batches):
            has = {kind for kind in ("F", "B", "I", "W") if Action(kind, stage, micro_batch) in counts}
            if "F" not in has:
                raise _error(schedule, f"{stage}F{micro_batch} is missing")
            if schedule.computes_gradients and has not in ({"F", "B"}, {"F", "I", "W"}):
                which = f"stage {stage}, micro-batch {micro_batch}"
                raise _error(schedule, f"{which} has {' and '.join(sorted(has))}: it needs F, and then B alone or I and W")


def _check_rows_ordered(schedule: Schedule) -> None:
    """On its rank F comes before B or I, and I before W."""
    for rank, row in enumerate(schedule.rows):
        seen: set[Action] = set()
        for place, action in enumerate(row):
            before = None if action.kind == "F" else action._replace(kind="I" if action.kind == "W" else "F")
            if before is not None and before not in seen:
                raise _error(schedule, f"on rank {rank}, {action} (number {place + 1}) stands before {before}")
            seen.add(action)


def _walk(schedule: Schedule, steps: tuple[tuple[Step, ...], ...]) -> None:
    """Work through all rows as the executor does, with sends that complete only once their receive is posted.

    A channel is a queue: message n passes when it is sent, its receive is posted, and n - 1 has passed.
    """
    sent: dict[tuple[int, int], int] = {}
    posted: dict[tuple[int, int], int] = {}
    done: set[tuple[bool, int, int]] = set()
    at = [0] * schedule.num_ranks
    ready = deque(range(schedule.num_ranks))

    def passed(transfer: Transfer) -> bool:
        channel = transfer.sender, transfer.receiver
        return min(sent.get(channel, 0), posted.get(channel, 0)) > transfer.number

    def blocked(step: Step) -> bool:
        if step.needs is not None:
            return not passed(step.needs)
        source = source_of(step.action, schedule.num_stages)
        return source is not None and (*source, step.action.micro_batch) not in done

    while ready:
        rank = ready.popleft()
        while at[rank] < len(steps[rank]):
            step = steps[rank][at[rank]]
            for transfer in step.posts:
                channel = transfer.sender, transfer.receiver
                posted[channel] = max(posted.get(channel, 0), transfer.number + 1)
            if blocked(step):
                break
            action = step.action
            if action.kind != "W":
                done.add((action.kind == "F", action.stage, action.micro_batch))
            if step.sends is not None:
                channel = step.sends.sender, step.sends.receiver
                assert step.sends.number == sent.get(channel, 0), "a channel's messages are numbered in the order of sending"
                sent[channel] = step.sends.number + 1
                ready.append(step.sends.receiver)
            at[rank] += 1
    stuck = [rank for rank, place in enumerate(at) if place < len(steps[rank])]
    if stuck:
        raise _error(schedule, "deadlock: " + "; ".join(_waits(schedule, steps[rank][at[rank]].action, rank) for rank in stuck))


def _waits(schedule: Schedule, action: Action, rank: int) -> str:
    source = source_of(action, schedule.num_stages)
    assert source is not None
    forward, stage = source
    what = f"{stage}F{action.micro_batch}" if forward else f"{stage}B{action.micro_batch} or {stage}I{action.micro_batch}"
    return f"rank {rank} stands at {action} and waits for {what} of rank {schedule.rank_of_stage[stage]}"


def _error(schedule: Schedule, problem: str) -> ScheduleError:
    return ScheduleError(f"{schedule.name}: {problem}", field="schedule")
