"""Several datasets read in given shares: sample `index` of epoch `epoch` is a function of the two and the seed.

An epoch has as many samples as all parts together. Of those each part gets its share, by largest remainder; it hands its own
samples out in passes, each a permutation of its own, that go on from epoch to epoch: none is seen twice before all are seen
once. The order of the run shuffles the samples of the epoch, so the shares hold for any stretch of it, about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardwright.data.dataset import Sample, TokenDataset
from shardwright.data.order import SampleOrder, mix


def apportion(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`total` in parts like `weights`, by largest remainder.

    >>> apportion(10, [1, 1, 1])
    (4, 3, 3)
    """
    shares = [total * weight / sum(weights) for weight in weights]
    parts = [int(share) for share in shares]
    by_remainder = sorted(range(len(parts)), key=lambda part: (parts[part] - shares[part], part))
    for part in by_remainder[: total - sum(parts)]:
        parts[part] += 1
    return tuple(parts)


@dataclass(frozen=True)
class MixedDataset:
    """Parts read by weight. All have the same sequence length and either all or none have document ids."""

    parts: tuple[TokenDataset, ...]
    weights: tuple[float, ...]
    seed: int

    @property
    def sequence_length(self) -> int:
        """Tokens of a sample."""
        return self.parts[0].sequence_length

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def counts(self) -> tuple[int, ...]:
        """Samples of each part in an epoch."""
        return apportion(len(self), self.weights)

    @property
    def num_supervised(self) -> int:
        """Tokens predicted in one epoch, on average over epochs."""
        return round(sum(n * part.num_supervised / len(part) for n, part in zip(self.counts, self.parts, strict=True)))

    @property
    def is_uneven(self) -> bool:
        """Whether any part is."""
        return any(part.is_uneven for part in self.parts)

    def num_used(self, index: int, epoch: int = 0) -> int:
        """Positions of sample `index` that hold something."""
        part, inner, turn = self.locate(index, epoch)
        return self.parts[part].num_used(inner, turn)

    def locate(self, index: int, epoch: int) -> tuple[int, int, int]:
        """The part, its sample, and the pass over the part in which it is read."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        counts = self.counts
        ends = list(accumulate(counts))
        part = next(number for number, end in enumerate(ends) if index < end)
        draw = epoch * counts[part] + index - (ends[part] - counts[part])
        order = SampleOrder(mix(self.seed ^ mix(part + 1)), len(self.parts[part]))
        return part, order.index_at(draw), order.epoch_at(draw)

    def sample(self, index: int, epoch: int = 0) -> Sample:
        """Sample `index` of an epoch."""
        part, inner, turn = self.locate(index, epoch)
        return self.parts[part].sample(inner, turn)
