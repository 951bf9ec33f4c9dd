"""A pipeline schedule as data: for every rank, which stage computes which micro-batch, and in what order.

Planner, simulator, executor and renderer all read this one value; sends and receives follow from it (`schedule.transfers`), so that
they cannot contradict it. The letters are PyTorch's: `2F0` is the forward of stage 2 for micro-batch 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]

KINDS: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradients",
    "W": "weight gradients",
}
"""B = I and W in one go. I gives the stage before it what it waits for; W may be put off."""


class Action(NamedTuple):
    """One piece of computing: `kind` for a micro-batch, on a stage.

    >>> str(Action("F", 2, 0))
    '2F0'
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """What each rank of the pipeline computes, in order. Rows, stages and micro-batches count from 0.

    >>> str(Schedule("by hand", ((Action("F", 0, 0), Action("B", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0)))))
    'by hand: 2 ranks, 2 stages, 1 micro-batch'
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]

    def __hash__(self) -> int:
        # Asked for at every simulation, and thousands of actions long.
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.rows))

    @property
    def num_ranks(self) -> int:
        """Ranks along the pipeline."""
        return len(self.rows)

    @cached_property
    def num_stages(self) -> int:
        """Stages of the model, all ranks together."""
        return 1 + max((action.stage for row in self.rows for action in row), default=-1)

    @cached_property
    def num_micro_batches(self) -> int:
        """Micro-batches of one step."""
        return 1 + max((action.micro_batch for row in self.rows for action in row), default=-1)

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The rank that holds each stage; -1 where no rank computes it, the first where several do (`check` refuses both)."""
        held = [-1] * self.num_stages
        for rank, row in enumerate(self.rows):
            for action in row:
                if held[action.stage] < 0:
                    held[action.stage] = rank
        return tuple(held)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that a rank holds, ascending."""
        return tuple(stage for stage, holder in enumerate(self.rank_of_stage) if holder == rank)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backward is cut into I and W."""
        return any(action.kind == "W" for row in self.rows for action in row)

    @cached_property
    def computes_gradients(self) -> bool:
        """Whether there is any backward; evaluation has none."""
        return any(action.kind != "F" for row in self.rows for action in row)

    def warning(self) -> str | None:
        """What to say where there are fewer than two micro-batches for each rank: most of the step is then waiting.

        >>> print(Schedule("one", ((Action("F", 0, 0),), (Action("F", 1, 0),))).warning())
        1 micro-batch for 2 pipeline ranks: at best 1 / 2 = 50% of the step computes, with 4 micro-batches 80%
        """
        p, m = self.num_ranks, self.num_micro_batches
        if p == 1 or m >= 2 * p:
            return None
        return (
            f"{m} micro-batch{'es' if m > 1 else ''} for {p} pipeline ranks: at best {m} / {m + p - 1} = {m / (m + p - 1):.0%} of "
            f"the step computes, with {2 * p} micro-batches {2 * p / (3 * p - 1):.0%}"
        )

    def __str__(self) -> str:
        counts = ((self.num_ranks, "rank"), (self.num_stages, "stage"), (self.num_micro_batches, "micro-batch"))
        return f"{self.name}: " + ", ".join(
            f"{number} {what}{'' if number == 1 else 'es' if what.endswith('ch') else 's'}" for number, what in counts
        )


def looped(num_ranks: int, num_stages: int) -> tuple[int, ...]:
    """The rank of each stage when they are dealt round and round.

    >>> looped(2, 4)
    (0, 1, 0, 1)
    """
    return tuple(stage % num_ranks for stage in range(num_stages))


def folded(num_ranks: int) -> tuple[int, ...]:
    """The rank of each of two stages a rank when the second half comes back: rank r holds r and 2p - 1 - r.

    >>> folded(2)
    (0, 1, 1, 0)
    """
    return (*range(num_ranks), *reversed(range(num_ranks)))


def forward_only(rank_of_stage: Sequence[int], num_micro_batches: int) -> Schedule:
    """Forwards alone, for evaluation: as soon as may be, the later stage first where a rank holds several.

    >>> [str(action) for action in forward_only((0, 1, 1, 0), 2).rows[0]]
    ['0F0', '0F1', '3F0', '3F1']
    """
    rows: list[list[Action]] = [[] for _ in range(1 + max(rank_of_stage))]
    # Unit times: stage s could do micro-batch i at s + i. Sorted by that instant no forward stands before one that it waits for.
    for stage, rank in enumerate(rank_of_stage):
        rows[rank] += [Action("F", stage, micro_batch) for micro_batch in range(num_micro_batches)]
    return Schedule(
        "forward only",
        tuple(tuple(sorted(row, key=lambda action: (action.stage + action.micro_batch, -action.stage))) for row in rows),
    )
