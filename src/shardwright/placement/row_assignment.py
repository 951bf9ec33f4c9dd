"""Assignment of a step's rows to micro-batches and data ranks.

A step reads a fixed set of rows, and its gradient is a sum over them, so which rank computes a
row, and in which micro-batch, changes no result. It changes the time: the rows of a micro-batch
are padded to the longest, and ranks wait for the one with the most work.

Slot (a x data_ranks + r) x micro_batch_size + i is row i of micro-batch a on data rank r.
"""

from __future__ import annotations

from collections.abc import Sequence


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
