"""Random rows that expose wrong gradients: ranks differ in the number of supervised tokens.

Shapes: T tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwright.config.data import IGNORED_LABEL
from shardwright.data.dataset import Sample
from shardwright.data.sample_order import SampleOrder
from shardwright.plans import BatchPlan

_SUPERVISED_SHARES = (0.9, 0.5, 0.2)
"""Expected share of a row's tokens that is supervised, by data rank."""


_LOSS_WEIGHTS = np.array([0.1, 0.25, 1.0, 3.0], dtype=np.float32)
"""Loss weights of tokens; their mean is not 1."""


@dataclass(frozen=True)
class UnevenDataset:
    """Random rows for a few steps of a batch plan; content depends on seed and global position.

    A row holds several documents, or one that leaves up to half of the row as padding. The last
    data rank has one supervised token per step, in its last micro-batch, so with accumulation
    its other micro-batches have none. With one data rank the first of several micro-batches has
    none.
    """

    vocab_size: int
    batch: BatchPlan
    num_steps: int
    seed: int
    has_documents: bool
    has_weights: bool = False

    @property
    def sequence_length(self) -> int:
        """Tokens of a row."""
        return self.batch.sequence_length

    @property
    def num_supervised(self) -> int:
        """Supervised tokens of all steps."""
        return sum(
            int(np.count_nonzero(self.build_row(p).labels != IGNORED_LABEL))
            for p in range(len(self))
        )

    @property
    def is_uneven(self) -> bool:
        """False, so that rows are not reordered: these rows depend on the data rank."""
        return False

    def count_used_positions(self, index: int, epoch: int = 0) -> int:
        """Count the positions of a row that are not padding."""
        return self.sequence_length - self.get_sample(index, epoch).num_padding

    def list_document_lengths(self, index: int, epoch: int = 0) -> tuple[int, ...]:
        """Count the positions of each document of a row."""
        documents = self.get_sample(index, epoch).document_ids
        if documents is None:
            return (self.count_used_positions(index, epoch),)
        return tuple(np.unique(documents, return_counts=True)[1].tolist())

    @property
    def order(self) -> SampleOrder:
        """Sample order of the rows."""
        return SampleOrder(self.seed, len(self))

    def __len__(self) -> int:
        return self.batch.global_batch_size * self.num_steps

    @cached_property
    def _position_by_index(self) -> dict[int, int]:
        return {self.order.get_index(position): position for position in range(len(self))}

    def get_sample(self, index: int, epoch: int = 0) -> Sample:
        """Return the row that the order reads as sample `index`."""
        assert epoch == 0, "the cursor is beyond the data"
        return self.build_row(self._position_by_index[index])

    def build_row(self, position: int) -> Sample:
        """Build the row at a global position."""
        random = np.random.default_rng([self.seed, position])
        length = self.sequence_length
        tokens = random.integers(self.vocab_size, size=length + 1)
        inputs = tokens[:-1]
        labels = tokens[1:].copy()
        positions = np.arange(length)
        document_ids = None
        num_padding = 0
        if not self.has_documents:
            num_padding = int(
                np.random.default_rng([self.seed, position, 1]).integers(length // 2 + 1)
            )
            labels[length - num_padding :] = IGNORED_LABEL
            positions = np.minimum(positions, length - num_padding - 1)
        if self.has_documents:
            starts = np.sort(
                random.choice(np.arange(1, length), size=min(3, length - 1), replace=False)
            )
            document_ids = np.searchsorted(starts, np.arange(length), side="right")
            positions = np.arange(length) - np.concatenate([[0], starts])[document_ids]
            labels[starts - 1] = IGNORED_LABEL  # the next token is another document's
        labels[~self._choose_supervised(position, random, labels != IGNORED_LABEL)] = IGNORED_LABEL
        weights = random.choice(_LOSS_WEIGHTS, size=length) if self.has_weights else None
        return Sample(inputs, labels, positions, document_ids, weights, num_padding)

    def _choose_supervised(
        self, position: int, random: np.random.Generator, allowed: np.ndarray
    ) -> np.ndarray:
        """Choose the supervised tokens among the `allowed` ones, `[T]`."""
        batch = self.batch
        accumulation, rest = divmod(
            position % batch.global_batch_size, batch.micro_batch_size * batch.data_ranks
        )
        data_rank, row = divmod(rest, batch.micro_batch_size)
        chosen = np.zeros_like(allowed)
        if batch.data_ranks == 1 and accumulation == 0 and batch.gradient_accumulation_steps > 1:
            return chosen
        if batch.data_ranks > 1 and data_rank == batch.data_ranks - 1:
            if row == 0 and accumulation == batch.gradient_accumulation_steps - 1:
                chosen[random.choice(np.flatnonzero(allowed))] = True
            return chosen
        return allowed & (
            random.random(len(allowed)) < _SUPERVISED_SHARES[data_rank % len(_SUPERVISED_SHARES)]
        )
