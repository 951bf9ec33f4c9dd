"""Messages between ranks under a schedule, and the points at which each rank posts them.

Both follow from the order of the actions. A stage's output goes to the next stage and the
gradient of its input to the previous one; between stages of one rank nothing is sent. Two ranks
have a channel per direction, which delivers messages in the order in which their sender
computes them.

Before an action a rank posts every receive that this action or the `LOOKAHEAD` actions after it
need; it then waits for the input of this action, computes, and posts its send without waiting.
As channels keep their order, posting a receive means posting all earlier ones on its channel.

Channels are assigned to process groups such that no rank has two channels in one group: NCCL
runs the operations of a rank and group one after another, and a send behind a receive would wait
for that receive's message. So messages wait for earlier messages of their own channel only, and a
schedule runs to its end if its dependencies have no cycle; `check` proves both on the graph of
`communication_graph`. Why: docs/decisions/0057-channel-groups.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import NamedTuple

from shardwright.schedule.actions import Action, Schedule

LOOKAHEAD = 2
"""Actions by which receives are posted ahead: one computes while the next one's input arrives.
"""

Channel = tuple[int, int]
"""Sender and receiver of messages: positions in the pipeline."""


class Transfer(NamedTuple):
    """Message with the result of `action`: the output of F, or the input gradient of B or I.

    `sequence_number` counts the messages of the channel from `sender` to `receiver`, in the order
    of sending.
    """

    action: Action
    sender: int
    receiver: int
    sequence_number: int

    @property
    def is_gradient(self) -> bool:
        """True for a gradient of hidden states, False for hidden states."""
        return self.action.kind != "F"

    @property
    def channel(self) -> Channel:
        """Channel of the message."""
        return self.sender, self.receiver

    def __str__(self) -> str:
        return f"the message of {self.action} from rank {self.sender} to rank {self.receiver}"


@dataclass(frozen=True)
class ScheduleStep:
    """One action with its communication.

    The rank posts the receives `posted_receives` and waits for `awaited_transfer` before the
    action, and sends `sent_transfer` after it. `awaited_transfer` is None if the input is local.
    `completed_sends` are earlier messages of this rank, by their action, that have arrived when
    `awaited_transfer` has: its sender waited for them before it sent it.
    """

    action: Action
    posted_receives: tuple[Transfer, ...]
    awaited_transfer: Transfer | None
    sent_transfer: Transfer | None
    completed_sends: tuple[Action, ...] = ()


def find_source(action: Action, num_stages: int) -> tuple[bool, int] | None:
    """Find the action on another stage that an action waits for, as (is it a forward, stage).

    >>> find_source(Action("F", 0, 3), 4), find_source(Action("I", 2, 3), 4)
    (None, (False, 3))
    >>> find_source(Action("W", 2, 3), 4) is None
    True
    """
    if action.kind == "F":
        return (True, action.stage - 1) if action.stage else None
    if action.kind == "W" or action.stage == num_stages - 1:
        return None
    return (False, action.stage + 1)


def assign_channel_groups(rank_of_stage: Sequence[int]) -> dict[Channel, int]:
    """Assign each channel to a process group, by number, such that no rank has two in one group.

    Four groups suffice for a chain of stages and for a ring of an even number of ranks.

    >>> assign_channel_groups((0, 1, 2, 3))
    {(0, 1): 0, (1, 0): 1, (1, 2): 2, (2, 1): 3, (2, 3): 0, (3, 2): 1}
    """
    groups: dict[Channel, int] = {}
    groups_of_rank: dict[int, set[int]] = {rank: set() for rank in rank_of_stage}
    for rank, following in pairwise(rank_of_stage):
        for channel in ((rank, following), (following, rank)):
            if rank != following and channel not in groups:
                used = groups_of_rank[rank] | groups_of_rank[following]
                groups[channel] = next(number for number in count() if number not in used)
                groups_of_rank[rank].add(groups[channel])
                groups_of_rank[following].add(groups[channel])
    return groups


def plan_steps(
    schedule: Schedule, lookahead: int = LOOKAHEAD
) -> tuple[tuple[ScheduleStep, ...], ...]:
    """Plan every rank's steps. The schedule has passed `check`, or is being checked."""
    rank_of_stage = schedule.rank_of_stage
    num_stages = schedule.num_stages
    incoming: dict[tuple[bool, int, int], Transfer] = {}
    channels: dict[Channel, list[Transfer]] = {}
    sent: dict[Action, Transfer] = {}
    for rank, row in enumerate(schedule.rows):
        for action in row:
            receiver_stage = _find_receiver_stage(action, num_stages)
            if receiver_stage is None or rank_of_stage[receiver_stage] in (rank, -1):
                continue
            channel = channels.setdefault((rank, rank_of_stage[receiver_stage]), [])
            transfer = Transfer(action, rank, rank_of_stage[receiver_stage], len(channel))
            channel.append(transfer)
            sent[action] = incoming[action.kind == "F", action.stage, action.micro_batch] = transfer

    def find_input(action: Action) -> Transfer | None:
        source = find_source(action, num_stages)
        return None if source is None else incoming.get((*source, action.micro_batch))

    steps_of_ranks = []
    for row in schedule.rows:
        posted: dict[Channel, int] = {}
        inputs = [find_input(action) for action in row]
        steps = []
        num_examined = 0
        for position, action in enumerate(row):
            posts: list[Transfer] = []
            while num_examined < min(position + lookahead + 1, len(row)):
                receive = inputs[num_examined]
                if receive is not None:
                    num_posted = posted.get(receive.channel, 0)
                    posts += channels[receive.channel][num_posted : receive.sequence_number + 1]
                    posted[receive.channel] = max(num_posted, receive.sequence_number + 1)
                num_examined += 1
            steps.append(ScheduleStep(action, tuple(posts), inputs[position], sent.get(action)))
        steps_of_ranks.append(tuple(steps))
    completed_of = _list_completed_sends(steps_of_ranks)
    return tuple(
        tuple(
            step
            if step.awaited_transfer is None
            else replace(step, completed_sends=completed_of.get(step.awaited_transfer, ()))
            for step in steps
        )
        for steps in steps_of_ranks
    )


def _list_completed_sends(
    steps_of_ranks: Sequence[Sequence[ScheduleStep]],
) -> dict[Transfer, tuple[Action, ...]]:
    """List, for each message, the messages of its receiver that its sender has waited for since its
    last message to the same rank."""
    completed_of: dict[Transfer, tuple[Action, ...]] = {}
    for steps in steps_of_ranks:
        awaited_from: dict[int, list[Action]] = {}
        for step in steps:
            awaited = step.awaited_transfer
            if awaited is not None:
                awaited_from.setdefault(awaited.sender, []).append(awaited.action)
            sent = step.sent_transfer
            if sent is not None:
                completed_of[sent] = tuple(awaited_from.pop(sent.receiver, ()))
    return completed_of


def _find_receiver_stage(action: Action, num_stages: int) -> int | None:
    """Return the stage that waits for an action's result, or None."""
    if action.kind == "F":
        return action.stage + 1 if action.stage + 1 < num_stages else None
    return None if action.kind == "W" or action.stage == 0 else action.stage - 1
