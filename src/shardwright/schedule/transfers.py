"""What travels between ranks under a schedule, and when each rank posts it. It follows from the order of the actions.

A stage's output goes to the next stage and the gradient of its input to the stage before; between stages of one rank nothing
travels. Two ranks have a channel per direction, on which messages pass in the order in which their sender computes them.

A rank works through its row so: before an action it posts every receive that this action or the `LOOKAHEAD` after it need, then
waits for what this action needs, computes, and posts its send without waiting. As channels keep their order, posting a
receive means posting all before it on its channel. Nobody ever waits for a send, so the only thing that can hold a rank up is a
message whose sender has not computed it: a schedule runs through if its dependencies have no circle, which `check` proves by
walking these very steps with sends that complete only once their receive is posted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardwright.schedule.actions import Action, Schedule

LOOKAHEAD = 2
"""Actions ahead of which receives are posted: one computes while the next one's input comes in."""


class Transfer(NamedTuple):
    """A message that `action` makes: the output of its F, or what its B or I gives the stage before.

    `number` counts the messages of the channel from `sender` to `receiver`, in the order of sending.
    """

    action: Action
    sender: int
    receiver: int
    number: int

    @property
    def carries_gradient(self) -> bool:
        """A gradient of hidden states, not hidden states."""
        return self.action.kind != "F"


@dataclass(frozen=True)
class Step:
    """One action with its communication: `posts` and then a wait for `needs` before it, `sends` after it.

    `local` says that the input comes from another stage of the same rank.
    """

    action: Action
    posts: tuple[Transfer, ...]
    needs: Transfer | None
    sends: Transfer | None


def source_of(action: Action, num_stages: int) -> tuple[bool, int] | None:
    """Whose work on another stage an action waits for: (is it a forward, stage), or None.

    >>> source_of(Action("F", 0, 3), 4), source_of(Action("I", 2, 3), 4), source_of(Action("W", 2, 3), 4)
    (None, (False, 3), None)
    """
    if action.kind == "F":
        return (True, action.stage - 1) if action.stage else None
    if action.kind == "W" or action.stage == num_stages - 1:
        return None
    return (False, action.stage + 1)


def plan_steps(schedule: Schedule, lookahead: int = LOOKAHEAD) -> tuple[tuple[Step, ...], ...]:
    """Every rank's steps. The schedule has passed `check`, or is being checked."""
    holders, num_stages = schedule.rank_of_stage, schedule.num_stages
    arrivals: dict[tuple[bool, int, int], Transfer] = {}
    channels: dict[tuple[int, int], list[Transfer]] = {}
    sent: dict[Action, Transfer] = {}
    for rank, row in enumerate(schedule.rows):
        for action in row:
            to = _receiver(action, num_stages)
            if to is None or holders[to] in (rank, -1):
                continue
            channel = channels.setdefault((rank, holders[to]), [])
            transfer = Transfer(action, rank, holders[to], len(channel))
            channel.append(transfer)
            sent[action] = arrivals[action.kind == "F", action.stage, action.micro_batch] = transfer

    def needed(action: Action) -> Transfer | None:
        source = source_of(action, num_stages)
        return None if source is None else arrivals.get((*source, action.micro_batch))

    planned = []
    for row in schedule.rows:
        posted: dict[tuple[int, int], int] = {}
        needs = [needed(action) for action in row]
        steps, ahead = [], 0
        for place, action in enumerate(row):
            posts: list[Transfer] = []
            while ahead < min(place + lookahead + 1, len(row)):
                coming = needs[ahead]
                if coming is not None:
                    between = coming.sender, coming.receiver
                    done = posted.get(between, 0)
                    posts += channels[between][done : coming.number + 1]
                    posted[between] = max(done, coming.number + 1)
                ahead += 1
            steps.append(Step(action, tuple(posts), needs[place], sent.get(action)))
        planned.append(tuple(steps))
    return tuple(planned)


def _receiver(action: Action, num_stages: int) -> int | None:
    """The stage that waits for what an action makes."""
    if action.kind == "F":
        return action.stage + 1 if action.stage + 1 < num_stages else None
    return None if action.kind == "W" or action.stage == 0 else action.stage - 1
