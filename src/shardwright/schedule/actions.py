"""Pipeline schedules as data: for every rank, its actions (stage and micro-batch) in order.

Planner, simulator, executor and renderer all read this one value; sends and receives are
derived from it (`schedule.transfers`), so they cannot contradict it. The letters are PyTorch's:
`2F0` is the forward pass of stage 2 for micro-batch 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Literal, NamedTuple

from shardwright.units import format_items

ActionKind = Literal["F", "B", "I", "W"]

ACTION_KINDS: dict[ActionKind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradients",
    "W": "weight gradients",
}
"""Action kinds.

B is I and W at once. I computes what the previous stage waits for; W can run later.
"""


class Action(NamedTuple):
    """One computation: `kind` for a micro-batch, on a stage.

    >>> str(Action("F", 2, 0))
    '2F0'
    """

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


_get_stage = attrgetter("stage")
_get_micro_batch = attrgetter("micro_batch")


@dataclass(frozen=True)
class Schedule:
    """The actions of each pipeline rank, in order.

    Ranks, stages and micro-batches count from 0.

    >>> F, B = (Action(kind, 0, 0) for kind in "FB")
    >>> str(Schedule("by hand", ((F, B), (F._replace(stage=1), B._replace(stage=1)))))
    'by hand: 2 ranks, 2 stages, 1 micro-batch'
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]

    def __hash__(self) -> int:
        # Needed at every simulation, and rows have thousands of actions.
        return hash((self.name, *map(len, self.rows)))

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.rows)

    @cached_property
    def num_stages(self) -> int:
        """Number of stages of the model, over all ranks."""
        return 1 + max((max(map(_get_stage, row), default=-1) for row in self.rows), default=-1)

    @cached_property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of one step."""
        return 1 + max(
            (max(map(_get_micro_batch, row), default=-1) for row in self.rows), default=-1
        )

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        """Rank of each stage; -1 if no rank computes it, the first if several do.

        `check` refuses both cases.
        """
        ranks = [-1] * self.num_stages
        for rank, row in enumerate(self.rows):
            for stage in set(map(_get_stage, row)):
                if ranks[stage] < 0:
                    ranks[stage] = rank
        return tuple(ranks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, ascending."""
        return tuple(
            stage for stage, stage_rank in enumerate(self.rank_of_stage) if stage_rank == rank
        )

    @cached_property
    def has_split_backward(self) -> bool:
        """True if any backward pass is split into I and W."""
        return any(action.kind == "W" for row in self.rows for action in row)

    @cached_property
    def has_backward(self) -> bool:
        """True if there is any backward pass; evaluation has none."""
        return any(action.kind != "F" for row in self.rows for action in row)

    def describe_low_utilisation(self) -> str | None:
        """Describe low utilisation, if there are fewer than two micro-batches per rank.

        >>> schedule = Schedule("one", ((Action("F", 0, 0),), (Action("F", 1, 0),)))
        >>> print(schedule.describe_low_utilisation())
        1 micro-batch on 2 pipeline ranks: utilisation at most 1 / 2 = 50%; 4 micro-batches: 80%
        """
        p = self.num_ranks
        m = self.num_micro_batches
        if p == 1 or m >= 2 * p:
            return None
        return (
            f"{m} micro-batch{'es' if m > 1 else ''} on {p} pipeline ranks: utilisation at most "
            f"{m} / {m + p - 1} = {m / (m + p - 1):.0%}; "
            f"{2 * p} micro-batches: {2 * p / (3 * p - 1):.0%}"
        )

    def __str__(self) -> str:
        counts = (
            (self.num_ranks, "rank"),
            (self.num_stages, "stage"),
            (self.num_micro_batches, "micro-batch"),
        )
        return f"{self.name}: " + ", ".join(format_items(number, noun) for number, noun in counts)


def assign_looped_stages(num_ranks: int, num_stages: int) -> tuple[int, ...]:
    """Assign stages to ranks in turn; return the rank of each stage.

    >>> assign_looped_stages(2, 4)
    (0, 1, 0, 1)
    """
    return tuple(stage % num_ranks for stage in range(num_stages))


def assign_folded_stages(num_ranks: int) -> tuple[int, ...]:
    """Assign two stages to each rank: rank r holds r and 2p - 1 - r.

    Return the rank of each stage.

    >>> assign_folded_stages(2)
    (0, 1, 1, 0)
    """
    return (*range(num_ranks), *reversed(range(num_ranks)))


def build_forward_only(rank_of_stage: Sequence[int], num_micro_batches: int) -> Schedule:
    """Build a schedule of forward passes alone, for evaluation.

    Each runs as early as possible; a rank with several stages runs the later one first.

    >>> [str(action) for action in build_forward_only((0, 1, 1, 0), 2).rows[0]]
    ['0F0', '0F1', '3F0', '3F1']
    """
    rows: list[list[Action]] = [[] for _ in range(1 + max(rank_of_stage))]
    # With unit times stage s can run micro-batch i at time s + i. Sorted by that time, no
    # forward pass comes before one that it waits for.
    for stage, rank in enumerate(rank_of_stage):
        rows[rank] += [Action("F", stage, micro_batch) for micro_batch in range(num_micro_batches)]
    return Schedule(
        "forward only",
        tuple(
            tuple(
                sorted(row, key=lambda action: (action.stage + action.micro_batch, -action.stage))
            )
            for row in rows
        ),
    )
