"""Priority queue of the choices that a search has not expanded."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

from shardwright.planner.search.space import Degrees

QueuedChoice = tuple[float, int, int, Callable[..., None], tuple[Any, ...]]
"""Lower bound of the seconds of a step, axes of model parallelism in use, number in order of
arrival, method of a search that expands the choice, and its arguments after the search."""


class ChoiceQueue:
    """Choices by their bound; of equal bounds those with the fewest axes, then the earliest.

    Entries do not refer to a search, so that another search can expand them.
    """

    def __init__(self) -> None:
        self._heap: list[QueuedChoice] = []
        self._counter = count()

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def first(self) -> QueuedChoice:
        """The choice with the lowest bound."""
        return self._heap[0]

    def push(
        self,
        seconds: float,
        degrees: Degrees,
        expand: Callable[..., None],
        arguments: tuple[object, ...],
    ) -> None:
        """Add a choice."""
        heapq.heappush(
            self._heap,
            (seconds, degrees.num_parallel_axes, next(self._counter), expand, arguments),
        )

    def pop(self) -> QueuedChoice:
        """Remove and return the choice with the lowest bound."""
        return heapq.heappop(self._heap)

    def copy(self) -> ChoiceQueue:
        """Return a queue with the same choices. Later numbers continue these."""
        other = ChoiceQueue()
        other._heap = self._heap.copy()
        other._counter = self._counter
        return other

    def pop_all(self, expand: Callable[..., None]) -> list[QueuedChoice]:
        """Remove and return the choices that a method expands, lowest bound first."""
        removed = sorted(entry for entry in self._heap if entry[3] is expand)
        self._heap = [entry for entry in self._heap if entry[3] is not expand]
        heapq.heapify(self._heap)
        return removed

    def push_again(self, choice: QueuedChoice) -> None:
        """Add a choice that was removed."""
        heapq.heappush(self._heap, choice)
