"""Mixture of datasets by weights, which may follow a schedule over steps.

Every step has a fixed number of samples of each part, the weights times the batch size rounded up
or down. The roundings are spread evenly over the steps. Each part is read in its own order, one
sample after the other, so the sample at a position is a function of seed and position only.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shardwright.config.data import DataSection
from shardwright.data.dataset import Sample, TokenDataset
from shardwright.data.sample_order import mix_bits, permute

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_STEPS_PER_BLOCK = 1 << 14


class PositionOrder(Protocol):
    """Order of a dataset's samples: index and epoch of the sample at each global position."""

    def get_index(self, position: int) -> int:
        """Return the index of the sample at a global position."""
        ...

    def get_epoch(self, position: int) -> int:
        """Return the epoch of a global position."""
        ...


@dataclass(frozen=True)
class WeightSchedule:
    """Shares of the parts over steps: knots of (step, weights), constant or linear in between.

    The first knot is at step 0. After the last one the shares stay. A weight may be 0.

    >>> WeightSchedule(((0, (3.0, 1.0)), (10, (1.0, 1.0))), is_linear=True).get_shares(5)
    (0.625, 0.375)
    """

    knots: tuple[tuple[int, tuple[float, ...]], ...]
    is_linear: bool = False

    def get_shares(self, step: int) -> tuple[float, ...]:
        """Return the share of each part in a step; they add up to 1."""
        return tuple(self.compute_shares(np.array([step]))[0].tolist())

    def compute_shares(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the shares of each part, [steps, parts]."""
        knots = np.array([step for step, _ in self.knots], dtype=np.int64)
        shares = np.array(
            [[weight / math.fsum(weights) for weight in weights] for _, weights in self.knots]
        )
        current = np.searchsorted(knots, steps, side="right") - 1
        if not self.is_linear:
            return shares[current]
        following = np.minimum(current + 1, len(knots) - 1)
        span = np.maximum(knots[following] - knots[current], 1)
        part = ((steps - knots[current]) / span)[:, None]
        return shares[current] + part * (shares[following] - shares[current])


def build_weight_schedule(section: DataSection) -> WeightSchedule | None:
    """Return the schedule of the sources' weights; None if they have none."""
    weights = tuple(source.weight for source in section.sources if source.weight is not None)
    if not weights:
        return None
    knots = [(knot.step, knot.weights) for knot in section.weight_schedule]
    if not knots or knots[0][0] > 0:
        knots.insert(0, (0, weights))
    return WeightSchedule(tuple(knots), section.weight_transition == "linear")


def describe_weight_schedule(section: DataSection) -> list[Any]:
    """Return the schedule as JSON values, for hashes and checkpoints; empty if there is none."""
    knots = [knot.model_dump(mode="json") for knot in section.weight_schedule]
    return [knots, section.weight_transition] if knots else []


@dataclass(frozen=True)
class MixtureOrder:
    """Order of the samples of a mixture; an index counts the samples of all parts in order."""

    schedule: WeightSchedule
    part_orders: tuple[PositionOrder, ...]
    part_lengths: tuple[int, ...]
    global_batch_size: int
    seed: int
    _block_starts: list[npt.NDArray[np.int64]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    _step_counts: dict[int, npt.NDArray[np.int64]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def get_epoch(self, position: int) -> int:
        """Return the pass over its part of the sample at a global position."""
        part, inner = self.locate(position)
        return self.part_orders[part].get_epoch(inner)

    def get_index(self, position: int) -> int:
        """Return the index of the sample at a global position."""
        part, inner = self.locate(position)
        return sum(self.part_lengths[:part]) + self.part_orders[part].get_index(inner)

    def locate(self, position: int) -> tuple[int, int]:
        """Return the part of a global position, and the position in the order of that part."""
        step, offset = divmod(position, self.global_batch_size)
        # Shuffled, so that each rank reads all parts.
        key = mix_bits(mix_bits(self.seed & _MASK_64) ^ mix_bits(step) ^ 2)
        offset = permute(offset, self.global_batch_size, key)
        before = self.count_samples(step)
        num_in_step = self.count_samples(step + 1) - before
        ends = np.cumsum(num_in_step)
        part = int(np.searchsorted(ends, offset, side="right"))
        return part, int(before[part] + offset - (ends[part] - num_in_step[part]))

    def count_samples(self, step: int) -> npt.NDArray[np.int64]:
        """Return the number of samples of each part in all steps before `step`."""
        block, offset = divmod(step, _STEPS_PER_BLOCK)
        counts = self._step_counts.get(block)
        if counts is None:
            while len(self._block_starts) <= block:
                number = len(self._block_starts)
                start = (
                    self._block_starts[-1] + self._count_block(number - 1)[-1]
                    if number
                    else np.zeros(len(self.part_lengths), dtype=np.int64)
                )
                self._block_starts.append(start)
            if len(self._step_counts) > 1:
                self._step_counts.clear()
            counts = self._step_counts[block] = self._block_starts[block] + self._count_block(block)
        return counts[offset]

    def _count_block(self, block: int) -> npt.NDArray[np.int64]:
        """Return the samples of each part in the first 0, 1, ... steps of a block.

        Systematic sampling: of the points (k + u) / B for k below the batch size B, those within
        the part's interval of the cumulative shares count. The offsets u of the steps are
        multiples of the golden ratio modulo 1, which are spread evenly.
        """
        first = block * _STEPS_PER_BLOCK
        steps = np.arange(first, first + _STEPS_PER_BLOCK, dtype=np.int64)
        offsets = ((steps.astype(np.uint64) * np.uint64(_GOLDEN)) >> np.uint64(11)) / 2.0**53
        boundaries = np.cumsum(self.schedule.compute_shares(steps), axis=1)
        boundaries[:, -1] = 1.0
        batch_size = self.global_batch_size
        below = np.ceil(boundaries * batch_size - offsets[:, None]).astype(np.int64)
        below = np.clip(below, 0, batch_size)
        below[:, -1] = batch_size
        counts = np.diff(below, axis=1, prepend=0)
        return np.concatenate([np.zeros_like(counts[:1]), np.cumsum(counts, axis=0)])


@dataclass(frozen=True)
class ScheduledMixture:
    """Samples of several parts, in order of the parts; `build_order` says which are read when."""

    parts: tuple[TokenDataset, ...]
    schedule: WeightSchedule
    seed: int

    @property
    def sequence_length(self) -> int:
        """Tokens per sample."""
        return self.parts[0].sequence_length

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def num_supervised(self) -> int:
        """Tokens predicted in one epoch at the shares of the first step, on average over epochs."""
        return round(
            sum(
                len(self) * share * part.num_supervised / len(part)
                for share, part in zip(self.schedule.get_shares(0), self.parts, strict=True)
            )
        )

    @property
    def is_uneven(self) -> bool:
        """True if any part is uneven."""
        return any(part.is_uneven for part in self.parts)

    def count_used_positions(self, index: int, epoch: int = 0) -> int:
        """Return the number of positions of sample `index` that are not padding."""
        part, inner = self._locate(index)
        return part.count_used_positions(inner, epoch)

    def list_document_lengths(self, index: int, epoch: int = 0) -> tuple[int, ...]:
        """Return the positions of each document of sample `index`, without padding."""
        part, inner = self._locate(index)
        return part.list_document_lengths(inner, epoch)

    def get_sample(self, index: int, epoch: int = 0) -> Sample:
        """Return sample `index`; `epoch` is the pass over its part."""
        part, inner = self._locate(index)
        return part.get_sample(inner, epoch)

    def _locate(self, index: int) -> tuple[TokenDataset, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        return self.parts[number], index - (self._ends[number - 1] if number else 0)

    def build_order(
        self, part_orders: Sequence[PositionOrder], global_batch_size: int
    ) -> MixtureOrder:
        """Return the order of the run; one order for each part."""
        lengths = tuple(map(len, self.parts))
        return MixtureOrder(
            self.schedule, tuple(part_orders), lengths, global_batch_size, self.seed
        )
