"""Writing one rank's row: actions in order, each taking the next micro-batch of its stage and kind."""

from __future__ import annotations

from collections import defaultdict, deque

from shardwright.schedule.actions import Action, Kind


class Row:
    """Collects one rank's actions.

    Attributes:
        num_micro_batches: actions for micro-batches from here on are left out; the others still count.
    """

    def __init__(self, num_micro_batches: int) -> None:
        self.num_micro_batches = num_micro_batches
        self._actions: list[Action] = []
        self._next: dict[Kind, defaultdict[int, int]] = {"F": defaultdict(int), "B": defaultdict(int)}
        self._weights: deque[tuple[int, int]] = deque()

    def forward(self, stage: int) -> None:
        """F of the stage's next micro-batch."""
        self._add("F", stage, self._count("F", stage))

    def backward(self, stage: int, *, split: bool = False) -> None:
        """B of the stage's next micro-batch; `split`: I alone, and its W waits for `weights`."""
        micro_batch = self._count("B", stage)
        self._add("I" if split else "B", stage, micro_batch)
        if split:
            self._weights.append((stage, micro_batch))

    def weights(self) -> None:
        """The W that has waited longest, if any waits."""
        if self._weights:
            self._add("W", *self._weights.popleft())

    def counted(self, kind: Kind, stage: int) -> int:
        """Micro-batches whose `kind` the stage has been given (B counts I too)."""
        return self._next[kind][stage]

    @property
    def weights_wait(self) -> bool:
        """Whether any W waits."""
        return bool(self._weights)

    def actions(self) -> tuple[Action, ...]:
        """The row, with all that still waits at its end."""
        while self._weights:
            self.weights()
        return tuple(self._actions)

    def _count(self, kind: Kind, stage: int) -> int:
        following = self._next[kind]
        micro_batch = following[stage]
        following[stage] = micro_batch + 1
        return micro_batch

    def _add(self, kind: Kind, stage: int, micro_batch: int) -> None:
        if micro_batch < self.num_micro_batches:
            self._actions.append(Action(kind, stage, micro_batch))
