"""Order in which a run reads the samples of its dataset, and the documents of its rows."""

from __future__ import annotations

from shardwright.data.dataset import TokenDataset
from shardwright.data.sample_order import SampleOrder, mix_bits
from shardwright.data.scheduled_mixture import PositionOrder, ScheduledMixture
from shardwright.data.streaming.streamed_dataset import StreamedDataset


def build_run_order(dataset: TokenDataset, seed: int, global_batch_size: int) -> PositionOrder:
    """Return the order of a run's training samples.

    Shuffled over the whole dataset; for streamed data, over a window of files.

    Args:
        global_batch_size: samples per step, in which a mixture has fixed numbers of each part.
    """
    if isinstance(dataset, StreamedDataset):
        return dataset.order
    if isinstance(dataset, ScheduledMixture):
        orders = [
            build_run_order(part, mix_bits(seed ^ mix_bits(number)), global_batch_size)
            for number, part in enumerate(dataset.parts, start=1)
        ]
        return dataset.build_order(orders, global_batch_size)
    return SampleOrder(seed, len(dataset))


def list_row_documents(
    dataset: TokenDataset, order: PositionOrder, num_rows: int
) -> tuple[tuple[int, ...], ...]:
    """List the positions of each document of the first `num_rows` rows, in the order in which a
    run reads them. Rows repeat after an epoch."""
    return tuple(
        dataset.list_document_lengths(order.get_index(position), order.get_epoch(position))
        for position in range(num_rows)
    )
