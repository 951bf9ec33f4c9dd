"""From samples to the tensors of a micro-batch; the only file of this room that needs torch.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardwright.data.dataset import IGNORED_LABEL, Sample, TokenDataset
from shardwright.data.order import SampleOrder
from shardwright.plan import BatchPlan


@dataclass(frozen=True)
class MicroBatch:
    """What one rank sees in one forward pass. All tensors are int64, but for the weights; T may change from batch to batch.

    `labels_BT` is already shifted; IGNORED_LABEL (-100) is not supervised. `document_ids_BT` None: each row is one causal
    document. `sample_indices_B` are global positions in the order: equal on every layout, so randomness keyed by them is too.
    `weights_BT` (fp32) is what each label's loss weighs, None for 1 (in a dataset everywhere or nowhere); `weight_sum` adds up
    those of the supervised labels.
    """

    input_ids_BT: torch.Tensor
    labels_BT: torch.Tensor
    positions_BT: torch.Tensor
    document_ids_BT: torch.Tensor | None
    sample_indices_B: torch.Tensor
    num_supervised: int
    weights_BT: torch.Tensor | None = None
    weight_sum: float = 0.0
    reference_B2: torch.Tensor | None = None
    """Of pairs: log-probabilities of the responses under the reference (fp64), where this rank knows them."""

    def arguments(self) -> dict[str, torch.Tensor | None]:
        """What a decoder is called with for this batch's loss, by name."""
        return {
            "input_ids_BT": self.input_ids_BT,
            "positions_BT": self.positions_BT,
            "document_ids_BT": self.document_ids_BT,
            "labels_BT": self.labels_BT,
            **({} if self.weights_BT is None else {"weights_BT": self.weights_BT}),
        }

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same batch on a device; copies from pinned memory do not block."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True)

        return MicroBatch(
            input_ids_BT=move(self.input_ids_BT),
            labels_BT=move(self.labels_BT),
            positions_BT=move(self.positions_BT),
            document_ids_BT=None if self.document_ids_BT is None else move(self.document_ids_BT),
            sample_indices_B=move(self.sample_indices_B),
            num_supervised=self.num_supervised,
            weights_BT=None if self.weights_BT is None else move(self.weights_BT),
            weight_sum=self.weight_sum,
            reference_B2=None if self.reference_B2 is None else move(self.reference_B2),
        )


def step_micro_batches(dataset: TokenDataset, order: SampleOrder, batch: BatchPlan, step: int, data_rank: int) -> list[MicroBatch]:
    """The micro-batches that a data rank reads in an optimizer step, in order of accumulation.

    Step s reads the global positions s x G to (s + 1) x G - 1 whatever the layout; accumulation pass a of data rank r takes
    the micro_batch_size positions from s x G + (a x data_ranks + r) x micro_batch_size on. Where rows end with the longest of
    their micro-batch and differ much, the positions of the step are put in order of length first, longest first: a micro-batch
    then has rows that are alike, and so have the data ranks, which wait for each other. A step's gradient is a sum over its rows,
    and randomness goes by a row's position, so neither knows of it.
    """
    if not 0 <= data_rank < batch.data_ranks:
        raise ValueError(f"data rank {data_rank} of {batch.data_ranks}")
    micro, first = batch.micro_batch_size, step * batch.global_batch_size
    positions: Sequence[int] = range(first, first + batch.global_batch_size)

    def find(position: int) -> tuple[int, int]:
        return order.index_at(position), order.epoch_at(position)

    if batch.row_multiple is not None and len(positions) > micro and dataset.is_uneven:
        positions = sorted(positions, key=lambda position: -dataset.num_used(*find(position)))
    micro_batches = []
    for accumulation in range(batch.gradient_accumulation_steps):
        start = (accumulation * batch.data_ranks + data_rank) * micro
        here = positions[start : start + micro]
        micro_batches.append(collate([dataset.sample(*find(position)) for position in here], here, batch.row_multiple))
    return micro_batches


def evaluation_micro_batches(
    dataset: TokenDataset, batch: BatchPlan, data_rank: int, *, max_batches: int | None = None
) -> Iterator[MicroBatch]:
    """The rank's share of the whole dataset, read once over all data ranks, in dataset order.

    Every rank gets the same number of micro-batches, because a forward pass of a sharded model is a collective; what is
    missing at the end are rows without a supervised token. `max_batches` stops every rank after as many.
    """
    if not 0 <= data_rank < batch.data_ranks:
        raise ValueError(f"data rank {data_rank} of {batch.data_ranks}")
    micro = batch.micro_batch_size
    num_batches = -(-len(dataset) // (micro * batch.data_ranks))
    if max_batches is not None:
        num_batches = min(num_batches, max_batches)
    for number in range(num_batches):
        first = (number * batch.data_ranks + data_rank) * micro
        indices = range(first, first + micro)
        samples = [dataset.sample(index) if index < len(dataset) else _unsupervised(dataset) for index in indices]
        yield collate(samples, indices, batch.row_multiple)


def collate(samples: Sequence[Sample], sample_indices: Sequence[int], row_multiple: int | None = None) -> MicroBatch:
    """Samples as rows of one micro-batch.

    Args:
        row_multiple: cut off what is free in every row, down to a multiple of so many tokens; None leaves rows as they are.
    """
    if row_multiple is not None:
        samples = _without_free_columns(samples, row_multiple)
    labels_BT = np.stack([sample.labels for sample in samples])
    document_rows = [sample.document_ids for sample in samples if sample.document_ids is not None]
    assert len(document_rows) in (0, len(samples)), "a dataset gives document ids for all of its samples or for none"
    weight_rows = [sample.weights for sample in samples if sample.weights is not None]
    assert len(weight_rows) in (0, len(samples)), "a dataset gives weights for all of its samples or for none"
    supervised_BT = labels_BT != IGNORED_LABEL
    weights_BT = np.stack(weight_rows) if weight_rows else None
    return MicroBatch(
        input_ids_BT=torch.from_numpy(np.stack([sample.input_ids for sample in samples])),
        labels_BT=torch.from_numpy(labels_BT),
        positions_BT=torch.from_numpy(np.stack([sample.positions for sample in samples])),
        document_ids_BT=torch.from_numpy(np.stack(document_rows)) if document_rows else None,
        sample_indices_B=torch.tensor(list(sample_indices), dtype=torch.int64),
        num_supervised=int(np.count_nonzero(supervised_BT)),
        weights_BT=None if weights_BT is None else torch.from_numpy(weights_BT),
        weight_sum=0.0 if weights_BT is None else float(weights_BT[supervised_BT].sum(dtype=np.float64)),
    )


def _without_free_columns(samples: Sequence[Sample], row_multiple: int) -> list[Sample]:
    """The samples as long as the longest of them, rounded up: a function of what lies in the micro-batch alone.

    All ranks that share its rows read the same micro-batch, and so come to the same length without asking.
    """
    longest = max(len(sample.labels) - sample.num_free for sample in samples)
    length = max(1, -(-longest // row_multiple)) * row_multiple
    return [_shortened(sample, length) if length < len(sample.labels) else sample for sample in samples]


def _shortened(sample: Sample, length: int) -> Sample:
    documents, weights = sample.document_ids, sample.weights
    return Sample(
        sample.input_ids[:length],
        sample.labels[:length],
        sample.positions[:length],
        None if documents is None else documents[:length],
        None if weights is None else weights[:length],
        sample.num_free - (len(sample.labels) - length),
    )


def _unsupervised(dataset: TokenDataset) -> Sample:
    """A row that costs what any row costs and supervises nothing: the first sample with its labels taken away."""
    first = dataset.sample(0)
    return first._replace(labels=np.full_like(first.labels, IGNORED_LABEL))
