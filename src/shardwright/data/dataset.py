"""Tokens on disk seen as samples of fixed length.

Shapes: T tokens of a sample (training.sequence_length), N tokens of a stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shardwright.data.order import mix

IGNORED_LABEL = -100
Int64Array = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.unsignedinteger]


class Sample(NamedTuple):
    """One sequence. `labels[t]` is the target for position t: already shifted, IGNORED_LABEL where nothing is supervised.

    `num_free` positions at the end hold nothing; they supervise nothing, and what comes before does not see them.

    `weights[t]` is what the loss of label t weighs; None is 1. A dataset gives weights for all of its samples or for none.
    """

    input_ids: Int64Array
    labels: Int64Array
    positions: Int64Array
    document_ids: Int64Array | None
    weights: npt.NDArray[np.float32] | None = None
    num_free: int = 0


class TokenDataset(Protocol):
    """Samples by index. `epoch` chooses among equivalent ways to cut the same tokens, where the dataset has several."""

    @property
    def sequence_length(self) -> int:
        """Tokens of a sample."""
        ...

    @property
    def num_supervised(self) -> int:
        """Tokens predicted in one pass over all samples."""
        ...

    @property
    def is_uneven(self) -> bool:
        """Whether samples differ much in length, so that it is worth asking for it."""
        ...

    def __len__(self) -> int: ...

    def num_used(self, index: int, epoch: int = 0) -> int:
        """Positions of sample `index` that hold something."""
        ...

    def sample(self, index: int, epoch: int = 0) -> Sample:
        """Sample `index` as it is cut in `epoch`."""
        ...


@dataclass(frozen=True)
class WindowDataset:
    """A stream of N tokens cut into windows of T inputs and T labels; neighbours overlap by one token.

    For training (`whole=False`) the cut starts at another offset in every epoch, 0 to T - 1, a function of seed and epoch
    only: on a small corpus the same token is then seen in many contexts. So that every epoch has equally many windows,
    one window's worth of tokens at the ends is left out of each epoch (a different one each time).

    For evaluation (`whole=True`) the cut starts at 0 and a last, short window is filled up with unsupervised tokens:
    every token but the first is predicted exactly once.
    """

    tokens: TokenArray
    sequence_length: int
    seed: int = 0
    whole: bool = False

    def __len__(self) -> int:
        num_tokens, length = len(self.tokens), self.sequence_length
        if self.whole:
            return -((1 - num_tokens) // length)
        return 0 if num_tokens < length + 1 else max(1, (num_tokens - length) // length)

    @property
    def num_supervised(self) -> int:
        """Tokens predicted in one pass."""
        return max(0, len(self.tokens) - 1) if self.whole else len(self) * self.sequence_length

    @property
    def is_uneven(self) -> bool:
        """No: a window is full, but for the last of all."""
        return False

    def num_used(self, index: int, epoch: int = 0) -> int:
        """Positions of window `index` that hold text."""
        return min(self.sequence_length, len(self.tokens) - 1 - self.offset(epoch) - index * self.sequence_length)

    def offset(self, epoch: int) -> int:
        """First token of the first window of an epoch."""
        if self.whole:
            return 0
        choices = min(self.sequence_length, len(self.tokens) - len(self) * self.sequence_length)
        return mix(mix(self.seed) ^ mix(epoch)) % choices

    def sample(self, index: int, epoch: int = 0) -> Sample:
        """Window `index` of an epoch."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        length = self.sequence_length
        start = self.offset(epoch) + index * length
        window = np.asarray(self.tokens[start : start + length + 1], dtype=np.int64)
        inputs, labels = window[:-1], window[1:]
        if missing := length - len(inputs):
            inputs = np.pad(inputs, (0, missing))
            labels = np.pad(labels, (0, missing), constant_values=IGNORED_LABEL)
        return Sample(inputs, labels, np.arange(length), None, num_free=missing)
