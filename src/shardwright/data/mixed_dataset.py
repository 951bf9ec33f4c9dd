"""Mixture of datasets with given weights, a function of sample index, epoch and seed.

An epoch has as many samples as all parts together, apportioned to the parts by largest
remainder. Each part is read in passes, each a new permutation of its samples, that continue
across epochs: no sample repeats before all samples of the part were read. The sample order of
the run shuffles the epoch, so the weights hold approximately for any section of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardwright.data.dataset import Sample, TokenDataset
from shardwright.data.sample_order import SampleOrder, mix_bits


def apportion(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divide `total` in proportion to `weights`, by largest remainder.

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
    """Parts sampled by weight, of equal sequence length; all or none have document ids."""

    parts: tuple[TokenDataset, ...]
    weights: tuple[float, ...]
    seed: int

    @property
    def sequence_length(self) -> int:
        """Tokens per sample."""
        return self.parts[0].sequence_length

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def num_samples_per_part(self) -> tuple[int, ...]:
        """Number of samples of each part in an epoch."""
        return apportion(len(self), self.weights)

    @property
    def num_supervised(self) -> int:
        """Tokens predicted in one epoch, on average over epochs."""
        return round(
            sum(
                n * part.num_supervised / len(part)
                for n, part in zip(self.num_samples_per_part, self.parts, strict=True)
            )
        )

    @property
    def is_uneven(self) -> bool:
        """True if any part is uneven."""
        return any(part.is_uneven for part in self.parts)

    def count_used_positions(self, index: int, epoch: int = 0) -> int:
        """Return the number of positions of sample `index` that are not padding."""
        part, inner, epoch_of_part = self.locate_sample(index, epoch)
        return self.parts[part].count_used_positions(inner, epoch_of_part)

    def list_document_lengths(self, index: int, epoch: int = 0) -> tuple[int, ...]:
        """Return the positions of each document of sample `index`, without padding."""
        part, inner, epoch_of_part = self.locate_sample(index, epoch)
        return self.parts[part].list_document_lengths(inner, epoch_of_part)

    def locate_sample(self, index: int, epoch: int) -> tuple[int, int, int]:
        """Return the part, the sample's index in it, and the number of passes before."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample index {index} is not below {len(self)}")
        counts = self.num_samples_per_part
        ends = list(accumulate(counts))
        part = next(number for number, end in enumerate(ends) if index < end)
        position = epoch * counts[part] + index - (ends[part] - counts[part])
        order = SampleOrder(mix_bits(self.seed ^ mix_bits(part + 1)), len(self.parts[part]))
        return part, order.get_index(position), order.get_epoch(position)

    def get_sample(self, index: int, epoch: int = 0) -> Sample:
        part, inner, epoch_of_part = self.locate_sample(index, epoch)
        return self.parts[part].get_sample(inner, epoch_of_part)
