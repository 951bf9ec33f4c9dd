"""Builder of one rank's row: each action takes the next micro-batch of its stage and kind."""

from __future__ import annotations

from collections import defaultdict, deque

from shardwright.schedule.actions import Action, ActionKind


class RankRowBuilder:
    """Builder of one rank's actions.

    Attributes:
        num_micro_batches: actions for micro-batches from this number on are counted but left
            out.
    """

    def __init__(self, num_micro_batches: int) -> None:
        self.num_micro_batches = num_micro_batches
        self._actions: list[Action] = []
        self._next_micro_batch: dict[ActionKind, defaultdict[int, int]] = {
            "F": defaultdict(int),
            "B": defaultdict(int),
        }
        self._pending_weight_gradients: deque[tuple[int, int]] = deque()

    def add_forward(self, stage: int) -> None:
        """Add F of the stage's next micro-batch."""
        self._add("F", stage, self._advance_micro_batch("F", stage))

    def add_backward(self, stage: int, *, split: bool = False) -> None:
        """Add B of the stage's next micro-batch or, with `split`, its I; `add_weight_gradient` adds
        its W.
        """
        micro_batch = self._advance_micro_batch("B", stage)
        self._add("I" if split else "B", stage, micro_batch)
        if split:
            self._pending_weight_gradients.append((stage, micro_batch))

    def add_weight_gradient(self) -> None:
        """Add the W that has waited longest, if there is one."""
        if self._pending_weight_gradients:
            self._add("W", *self._pending_weight_gradients.popleft())

    def count_added(self, kind: ActionKind, stage: int) -> int:
        """Count the stage's micro-batches of this kind so far (B includes I)."""
        return self._next_micro_batch[kind][stage]

    def build(self) -> tuple[Action, ...]:
        """Return the row, with all pending W at its end."""
        while self._pending_weight_gradients:
            self.add_weight_gradient()
        return tuple(self._actions)

    def _advance_micro_batch(self, kind: ActionKind, stage: int) -> int:
        next_of_stage = self._next_micro_batch[kind]
        micro_batch = next_of_stage[stage]
        next_of_stage[stage] = micro_batch + 1
        return micro_batch

    def _add(self, kind: ActionKind, stage: int, micro_batch: int) -> None:
        if micro_batch < self.num_micro_batches:
            self._actions.append(Action(kind, stage, micro_batch))
