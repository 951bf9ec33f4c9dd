"""Assignment of a step's rows to micro-batches and data ranks.

A step reads a fixed set of rows, and its gradient is a sum over them, so which rank computes a
row, and in which micro-batch, changes no result. It changes the time: the rows of a micro-batch
are padded to the longest, and ranks wait for the one with the most work.

Slot (a x data_ranks + r) x micro_batch_size + i is row i of micro-batch a on data rank r.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from shardwright.layout import Layout

Item = TypeVar("Item")


@dataclass(frozen=True)
class WorkBalance:
    """Rule by which the work of rows is counted, and when ranks wait for each other.

    The unit of work is a token without its attention.
    """

    work_per_key: float
    """Work of attention to one key, by one token."""
    is_padded: bool
    """True if rows are one document each and padded to the longest of their micro-batch: all of
    them then have its work."""
    waits_each_micro_batch: bool
    """True if ranks exchange something after each micro-batch, not only at the end of the step."""
    is_pipeline: bool = False
    """True if micro-batches pass through pipeline stages."""

    def count_work(self, documents: Sequence[int]) -> float:
        """Count the work of a row of causal documents of these lengths.

        >>> WorkBalance(0.5, False, False).count_work([3, 1])
        7.5
        """
        return sum(length + self.work_per_key * length * (length + 1) / 2 for length in documents)


def waits_after_each_micro_batch(layout: Layout) -> bool:
    """Return True if ranks exchange parameters, gradients or tokens in each micro-batch."""
    return layout.ep > 1 or (layout.zero_stage >= 2 and layout.fsdp > 1)


def assign_by_work(work: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Assign items to ranks: as many to each, of similar work. Return each rank's, largest first.

    An item goes to the rank with the least work so far that has a slot left, the largest first
    (Graham, Bounds on multiprocessing timing anomalies, 1969).

    Args:
        work: work of each item; `num_ranks` divides their number.

    >>> assign_by_work([5.0, 1.0, 1.0, 5.0], 2)
    [[0, 1], [3, 2]]
    """
    per_rank = len(work) // num_ranks
    items: list[list[int]] = [[] for _ in range(num_ranks)]
    work_by_rank = [0.0] * num_ranks
    for item in sorted(range(len(work)), key=lambda item: -work[item]):
        rank = min(
            (rank for rank in range(num_ranks) if len(items[rank]) < per_rank),
            key=work_by_rank.__getitem__,
        )
        items[rank].append(item)
        work_by_rank[rank] += work[item]
    return items


def balance_rows(
    rows: Sequence[Sequence[int]], balance: WorkBalance, micro_batch_size: int, data_ranks: int
) -> list[int]:
    """Return the rows in the order of their slots, so that ranks wait for each other least.

    Rows of similar work form a micro-batch. If ranks wait after each micro-batch, those that
    follow each other in work run at the same time. Otherwise ranks get as many micro-batches each,
    of similar work. In a pipeline the largest of a rank's micro-batches run in the middle.

    Args:
        rows: lengths of the documents of each row.
    """
    work = [balance.count_work(documents) for documents in rows]
    order = sorted(range(len(rows)), key=lambda row: -work[row])
    if balance.waits_each_micro_batch or data_ranks == 1:
        size = micro_batch_size * data_ranks
        together = [order[first : first + size] for first in range(0, len(order), size)]
        if balance.is_pipeline:
            together = put_largest_in_middle(together)
        return list(chain.from_iterable(together))
    micro_batches = [
        order[first : first + micro_batch_size] for first in range(0, len(order), micro_batch_size)
    ]
    counts = [[work[row] for row in micro_batch] for micro_batch in micro_batches]
    assigned = assign_by_work(
        [len(each) * max(each) if balance.is_padded else sum(each) for each in counts], data_ranks
    )
    if balance.is_pipeline:
        assigned = [put_largest_in_middle(of_rank) for of_rank in assigned]
    return [
        row
        for of_each_rank in zip(*assigned, strict=True)
        for micro_batch in of_each_rank
        for row in micro_batches[micro_batch]
    ]


def put_largest_in_middle(items: Sequence[Item]) -> list[Item]:
    """Return items, given largest first, so that the smallest are first and last.

    A pipeline fills with its first micro-batches and drains with its last ones, while ranks wait.

    >>> put_largest_in_middle([5, 4, 3, 2, 1])
    [1, 3, 5, 4, 2]
    """
    growing = items[::-1]
    return [*growing[::2], *growing[1::2][::-1]]


def sort_by_length(lengths: Sequence[int]) -> list[int]:
    """Return the rows in the order of their slots: by length, longest first, then by number."""
    return sorted(range(len(lengths)), key=lambda row: -lengths[row])


def split_into_micro_batches(
    order: Sequence[int], micro_batch_size: int, data_ranks: int
) -> list[list[Sequence[int]]]:
    """Split the rows in the order of their slots: micro-batches of each data rank, by
    accumulation step and rank."""
    step = micro_batch_size * data_ranks
    return [
        [
            order[first + rank * micro_batch_size : first + (rank + 1) * micro_batch_size]
            for rank in range(data_ranks)
        ]
        for first in range(0, len(order), step)
    ]


def round_up_row_length(longest: int, row_multiple: int) -> int:
    """Return the length of rows that end with the longest of their micro-batch, in tokens.

    >>> round_up_row_length(13, 8), round_up_row_length(0, 8)
    (16, 8)
    """
    return max(1, -(-longest // row_multiple)) * row_multiple
