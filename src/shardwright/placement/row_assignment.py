"""Assignment of a step's rows to micro-batches and data ranks.

A step reads a fixed set of rows, and its gradient is a sum over them, so which rank computes a
row, and in which micro-batch, changes no result. It changes the time: the rows of a micro-batch
are padded to the longest, and ranks wait for the one with the most work.

Slot (a x data_ranks + r) x micro_batch_size + i is row i of micro-batch a on data rank r.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.layout import Layout


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

    def count_work(self, documents: Sequence[int]) -> float:
        """Count the work of a row of causal documents of these lengths.

        >>> WorkBalance(0.5, False, False).count_work([3, 1])
        7.5
        """
        return sum(length + self.work_per_key * length * (length + 1) / 2 for length in documents)


def waits_after_each_micro_batch(layout: Layout) -> bool:
    """Return True if ranks exchange parameters, gradients or tokens in each micro-batch."""
    return layout.ep > 1 or (layout.zero_stage >= 2 and layout.fsdp > 1)


def balance_rows(
    rows: Sequence[Sequence[int]], balance: WorkBalance, micro_batch_size: int, data_ranks: int
) -> list[int]:
    """Return the rows in the order of their slots, so that ranks wait for each other least.

    Rows of similar work form a micro-batch. If ranks wait after each micro-batch, those that
    follow each other in work run at the same time. Otherwise each micro-batch, the largest first,
    goes to the rank with the least work so far that has a slot left (Graham, Bounds on
    multiprocessing timing anomalies, 1969).

    Args:
        rows: lengths of the documents of each row.
    """
    work = [balance.count_work(documents) for documents in rows]
    order = sorted(range(len(rows)), key=lambda row: -work[row])
    if balance.waits_each_micro_batch or data_ranks == 1:
        return order
    micro_batches = [
        order[first : first + micro_batch_size] for first in range(0, len(order), micro_batch_size)
    ]
    num_steps = len(micro_batches) // data_ranks
    assigned: list[list[list[int]]] = [[] for _ in range(data_ranks)]
    totals = [0.0] * data_ranks
    for micro_batch in micro_batches:
        rank = min(
            (rank for rank in range(data_ranks) if len(assigned[rank]) < num_steps),
            key=lambda rank: totals[rank],
        )
        assigned[rank].append(micro_batch)
        counts = [work[row] for row in micro_batch]
        totals[rank] += len(counts) * max(counts) if balance.is_padded else sum(counts)
    return [
        row
        for step in range(num_steps)
        for rank in range(data_ranks)
        for row in assigned[rank][step]
    ]


def sort_by_length(lengths: Sequence[int]) -> list[int]:
    """Return the rows in the order of their slots, longest first; equal ones in their order."""
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
