"""Builder of one rank's row: each action takes the next micro-batch of its stage and kind."""

from __future__ import annotations

from collections import defaultdict, deque

from shardwright.schedule.actions import Action, Kind


class Row:
    """Builder of one rank's actions.

    Attributes:
        num_micro_batches: actions for micro-batches from this number on are counted but left
            out.
    """

    def __init__(self, num_micro_batches: int) -> None:
        self.num_micro_batches = num_micro_batches
        self._actions: list[Action] = []
        self._next: dict[Kind, defaultdict[int, int]] = {"F": defaultdict(int), "B": defaultdict(int)}
        self._weights: deque[tuple[int, int]] = deque()

    def forward(self, stage: int) -> None:
        """Add F of the stage's next micro-batch."""
        self._add("F", stage, self._count("F", stage))

    def backward(self, stage: int, *, split: bool = False) -> None:
        """Add B of the stage's next micro-batch or, with `split`, its I; `weights` adds its W."""
        micro_batch = self._count("B", stage)
        self._add("I" if split else "B", stage, micro_batch)
        if split:
            self._weights.append((stage, micro_batch))

    def weights(self) -> None:
        """Add the W that has waited longest, if there is one."""
        if self._weights:
            self._add("W", *self._weights.popleft())

    def counted(self, kind: Kind, stage: int) -> int:
        """Count the stage's micro-batches of this kind so far (B includes I)."""
        return self._next[kind][stage]

    @property
    def weights_wait(self) -> bool:
        """True if any W is pending."""
        return bool(self._weights)

    def actions(self) -> tuple[Action, ...]:
        """Return the row, with all pending W at its end."""
        while self._weights:
            self.weights()
        return tuple(self._actions)

    def _count(self, kind: Kind, stage: int) -> int:
        next_of_stage = self._next[kind]
        micro_batch = next_of_stage[stage]
        next_of_stage[stage] = micro_batch + 1
        return micro_batch

    def _add(self, kind: Kind, stage: int, micro_batch: int) -> None:
        if micro_batch < self.num_micro_batches:
            self._actions.append(Action(kind, stage, micro_batch))
