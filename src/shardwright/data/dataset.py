"""Samples of fixed length from tokens on disk.

Shapes: T tokens of a sample (training.sequence_length), N tokens of a stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shardwright.config.data import IGNORED_LABEL
from shardwright.data.sample_order import mix_bits

Int64Array = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.unsignedinteger]


class Sample(NamedTuple):
    """One sequence. `labels[t]` is the target of position t (shifted) or IGNORED_LABEL.

    The last `num_padding` positions are padding: unsupervised, and invisible to earlier positions.

    `weights[t]` is the loss weight of label t; None means 1. A dataset has weights for all of
    its samples or for none.
    """

    input_ids: Int64Array
    labels: Int64Array
    positions: Int64Array
    document_ids: Int64Array | None
    weights: npt.NDArray[np.float32] | None = None
    num_padding: int = 0


class TokenDataset(Protocol):
    """Samples by index. `epoch` selects one of several divisions of the same tokens."""

    @property
    def sequence_length(self) -> int:
        """Tokens per sample."""
        ...

    @property
    def num_supervised(self) -> int:
        """Tokens predicted in one pass over all samples."""
        ...

    @property
    def is_uneven(self) -> bool:
        """True if sample lengths differ enough that sorting by length saves padding."""
        ...

    def __len__(self) -> int: ...

    def count_used_positions(self, index: int, epoch: int = 0) -> int:
        """Return the number of positions of sample `index` that are not padding."""
        ...

    def list_document_lengths(self, index: int, epoch: int = 0) -> tuple[int, ...]:
        """Return the positions of each document of sample `index`, without padding."""
        ...

    def get_sample(self, index: int, epoch: int = 0) -> Sample:
        """Return sample `index` of `epoch`."""
        ...


@dataclass(frozen=True)
class WindowDataset:
    """Stream of N tokens in windows of T inputs and T labels that overlap by one token.

    For training (`is_evaluation=False`) the first window of every epoch starts at another offset, 0
    to T - 1, a function of seed and epoch only, so that a small corpus shows each token in many
    contexts. To give every epoch the same number of windows, each epoch leaves out one window of
    tokens at the ends of the stream, a different one each time.

    For evaluation (`is_evaluation=True`) the offset is 0 and the last, short window is padded with
    unsupervised tokens: every token but the first is predicted exactly once.
    """

    tokens: TokenArray
    sequence_length: int
    seed: int = 0
    is_evaluation: bool = False

    def __len__(self) -> int:
        num_tokens = len(self.tokens)
        length = self.sequence_length
        if self.is_evaluation:
            return -((1 - num_tokens) // length)
        return 0 if num_tokens < length + 1 else max(1, (num_tokens - length) // length)

    @property
    def num_supervised(self) -> int:
        """Tokens predicted in one pass over all windows."""
        return (
            max(0, len(self.tokens) - 1) if self.is_evaluation else len(self) * self.sequence_length
        )

    @property
    def is_uneven(self) -> bool:
        """Always False: all windows but the last are full."""
        return False

    def count_used_positions(self, index: int, epoch: int = 0) -> int:
        """Return the number of positions of window `index` that are not padding."""
        return min(
            self.sequence_length,
            len(self.tokens) - 1 - self.get_offset(epoch) - index * self.sequence_length,
        )

    def list_document_lengths(self, index: int, epoch: int = 0) -> tuple[int, ...]:
        """Return the positions of window `index`, which is one document."""
        return (self.count_used_positions(index, epoch),)

    def get_offset(self, epoch: int) -> int:
        """Return the index of the first token of the first window of an epoch."""
        if self.is_evaluation:
            return 0
        num_offsets = min(self.sequence_length, len(self.tokens) - len(self) * self.sequence_length)
        return mix_bits(mix_bits(self.seed) ^ mix_bits(epoch)) % num_offsets

    def get_sample(self, index: int, epoch: int = 0) -> Sample:
        """Return window `index` of an epoch."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        length = self.sequence_length
        start = self.get_offset(epoch) + index * length
        window = np.asarray(self.tokens[start : start + length + 1], dtype=np.int64)
        inputs = window[:-1]
        labels = window[1:]
        if missing := length - len(inputs):
            inputs = np.pad(inputs, (0, missing))
            labels = np.pad(labels, (0, missing), constant_values=IGNORED_LABEL)
        return Sample(inputs, labels, np.arange(length), None, num_padding=missing)
