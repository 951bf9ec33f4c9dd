"""Lengths of the documents of the rows that a run reads, without reading their tokens."""

from __future__ import annotations

from shardwright.data.dataset import TokenDataset
from shardwright.data.scheduled_mixture import PositionOrder


def list_row_documents(
    dataset: TokenDataset, order: PositionOrder, num_rows: int
) -> tuple[tuple[int, ...], ...]:
    """List the positions of each document of the first `num_rows` rows, in the order in which a
    run reads them. Rows repeat after an epoch."""
    return tuple(
        dataset.list_document_lengths(order.get_index(position), order.get_epoch(position))
        for position in range(num_rows)
    )
