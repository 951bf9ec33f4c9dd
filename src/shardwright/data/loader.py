"""Micro-batches: samples as tensors for one forward pass. No other module here imports torch.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from shardwright.config.data import IGNORED_LABEL
from shardwright.data.dataset import Sample, TokenDataset
from shardwright.data.scheduled_mixture import PositionOrder
from shardwright.placement.row_assignment import (
    balance_rows,
    round_up_row_length,
    sort_by_length,
    split_into_micro_batches,
)
from shardwright.plans import BatchPlan


@dataclass(frozen=True)
class MicroBatch:
    """Input of one rank for one forward pass. T may differ between micro-batches.

    All tensors are int64 except `weights_BT` and `reference_B2`. `labels_BT` is already
    shifted; IGNORED_LABEL (-100) marks unsupervised positions. If `document_ids_BT` is None,
    each row is one causal document. `sample_indices_B` are global positions in the sample
    order; they are the same on every layout, and so is randomness keyed by them. `weights_BT`
    (fp32) is the loss weight of each label, None if all are 1 (the same for all samples of a
    dataset); `weight_sum` is the sum over the supervised labels.
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
    """Log-probabilities of each pair's responses under the reference model (fp64), or None."""
    host_labels_BT: np.ndarray | None = None
    """Labels in host memory, from which the host counts without waiting for a device. `to` sets
    it. An array, because DDP and FSDP2 copy tensors among a model's arguments to the device."""
    host_document_ids_BT: np.ndarray | None = None
    """Document ids in host memory, likewise."""

    def build_model_arguments(self) -> dict[str, torch.Tensor | np.ndarray | None]:
        """Return the decoder's arguments by name, for the loss of this micro-batch."""
        return {
            "input_ids_BT": self.input_ids_BT,
            "positions_BT": self.positions_BT,
            "document_ids_BT": self.document_ids_BT,
            "labels_BT": self.labels_BT,
            "host_labels_BT": self.host_labels_BT,
            "host_document_ids_BT": self.host_document_ids_BT,
            **({} if self.weights_BT is None else {"weights_BT": self.weights_BT}),
        }

    def to(self, device: torch.device | str) -> MicroBatch:
        """Copy the micro-batch to a device; copies from pinned memory do not block."""

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
            host_labels_BT=_read_on_host(self.labels_BT, self.host_labels_BT),
            host_document_ids_BT=_read_on_host(self.document_ids_BT, self.host_document_ids_BT),
        )

    def pin_memory(self) -> MicroBatch:
        """Copy the micro-batch to pinned memory, from which `to` copies without blocking."""
        pinned: dict[str, Any] = {
            field.name: value.contiguous().pin_memory()
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **pinned)


def _read_on_host(tensor: torch.Tensor | None, known: np.ndarray | None) -> np.ndarray | None:
    """Return the values of a tensor in host memory; None if it is on a device or fake."""
    if known is not None or tensor is None:
        return known
    return tensor.numpy() if type(tensor) is torch.Tensor and tensor.device.type == "cpu" else None


def read_step_micro_batches(
    dataset: TokenDataset, order: PositionOrder, batch: BatchPlan, step: int, data_rank: int
) -> list[MicroBatch]:
    """Return the micro-batches of one data rank in an optimizer step, in order of accumulation.

    Step s reads the global positions s x G to (s + 1) x G - 1 on every layout, where G is the
    global batch size. Accumulation step a of data rank r takes micro_batch_size positions from
    s x G + (a x data_ranks + r) x micro_batch_size on. With `batch.balance` the positions of the
    step are ordered by the work of their rows first (`placement.row_assignment`). Otherwise, if
    micro-batches are trimmed to their longest row and rows differ much in length, the positions of
    the step are sorted by length first, longest first, so that the rows of a micro-batch, and the
    micro-batches of data ranks that wait for each other, have similar lengths. Neither order
    changes a result: the gradient of a step is a sum over its rows, and randomness depends on a
    row's position only.
    """
    if not 0 <= data_rank < batch.data_ranks:
        raise ValueError(f"data rank {data_rank} is not below {batch.data_ranks}")
    micro_batch_size = batch.micro_batch_size
    first = step * batch.global_batch_size
    positions: Sequence[int] = range(first, first + batch.global_batch_size)

    def find(position: int) -> tuple[int, int]:
        return order.get_index(position), order.get_epoch(position)

    if batch.balance is not None:
        rows = [dataset.list_document_lengths(*find(position)) for position in positions]
        rows_by_slot = balance_rows(rows, batch.balance, micro_batch_size, batch.data_ranks)
        positions = [positions[row] for row in rows_by_slot]
    elif batch.row_multiple is not None and len(positions) > micro_batch_size and dataset.is_uneven:
        lengths = [dataset.count_used_positions(*find(position)) for position in positions]
        positions = [positions[row] for row in sort_by_length(lengths)]
    micro_batches = []
    for batch_positions_by_rank in split_into_micro_batches(
        positions, micro_batch_size, batch.data_ranks
    ):
        batch_positions = batch_positions_by_rank[data_rank]
        samples = [dataset.get_sample(*find(position)) for position in batch_positions]
        micro_batches.append(collate(samples, batch_positions, batch.row_multiple))
    return micro_batches


def iterate_evaluation_micro_batches(
    dataset: TokenDataset,
    batch: BatchPlan,
    data_rank: int,
    *,
    max_batches: int | None = None,
    max_rows: int | None = None,
) -> Iterator[MicroBatch]:
    """Yield one data rank's share of the dataset, in order; together all ranks read it once.

    Every rank gets the same number of micro-batches, because the forward pass of a sharded
    model contains collectives; rows without supervised tokens fill the last ones.

    Args:
        max_batches: limit of the micro-batches of each rank.
        max_rows: limit of the rows of all ranks together; the first ones are read.
    """
    if not 0 <= data_rank < batch.data_ranks:
        raise ValueError(f"data rank {data_rank} of {batch.data_ranks}")
    micro_batch_size = batch.micro_batch_size
    num_rows = len(dataset) if max_rows is None else min(len(dataset), max_rows)
    num_batches = -(-num_rows // (micro_batch_size * batch.data_ranks))
    if max_batches is not None:
        num_batches = min(num_batches, max_batches)
    for number in range(num_batches):
        first = (number * batch.data_ranks + data_rank) * micro_batch_size
        indices = range(first, first + micro_batch_size)
        samples = [
            dataset.get_sample(index) if index < num_rows else _build_unsupervised_sample(dataset)
            for index in indices
        ]
        yield collate(samples, indices, batch.row_multiple)


def collate(
    samples: Sequence[Sample], sample_indices: Sequence[int], row_multiple: int | None = None
) -> MicroBatch:
    """Stack samples as rows of one micro-batch.

    Args:
        row_multiple: trim padding that is common to all rows, to a multiple of this many
            tokens; None keeps all padding.
    """
    if row_multiple is not None:
        samples = _trim_padding(samples, row_multiple)
    labels_BT = np.stack([sample.labels for sample in samples])
    document_rows = [sample.document_ids for sample in samples if sample.document_ids is not None]
    assert len(document_rows) in (0, len(samples)), "document ids for some samples only"
    weight_rows = [sample.weights for sample in samples if sample.weights is not None]
    assert len(weight_rows) in (0, len(samples)), "weights for some samples only"
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
        weight_sum=0.0
        if weights_BT is None
        else float(weights_BT[supervised_BT].sum(dtype=np.float64)),
    )


def _trim_padding(samples: Sequence[Sample], row_multiple: int) -> list[Sample]:
    """Truncate the samples to the longest one without padding, rounded up to a multiple.

    The length depends on this micro-batch only, so ranks that share its rows (cp, tp) agree on
    it without communication.
    """
    longest = max(len(sample.labels) - sample.num_padding for sample in samples)
    length = round_up_row_length(longest, row_multiple)
    return [
        _truncate_sample(sample, length) if length < len(sample.labels) else sample
        for sample in samples
    ]


def _truncate_sample(sample: Sample, length: int) -> Sample:
    documents = sample.document_ids
    weights = sample.weights
    return Sample(
        sample.input_ids[:length],
        sample.labels[:length],
        sample.positions[:length],
        None if documents is None else documents[:length],
        None if weights is None else weights[:length],
        sample.num_padding - (len(sample.labels) - length),
    )


def _build_unsupervised_sample(dataset: TokenDataset) -> Sample:
    """Return the first sample without supervised labels, to fill up the last micro-batch."""
    first = dataset.get_sample(0)
    return first._replace(labels=np.full_like(first.labels, IGNORED_LABEL))
