"""Dataset over streamed shards, and the order in which its samples are read.

An epoch reads the shards in an order of its own, in windows of a few shards. The samples of a
window are shuffled together. So the sample at a position is a function of seed and position, any
position can be the first, and the shards to fetch next are known.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np

from shardwright.data.dataset import Sample
from shardwright.data.sample_order import mix_bits, permute
from shardwright.data.streaming.shard_index import OpenShard, ShardIndex
from shardwright.errors import ShardwrightError

logger = logging.getLogger(__name__)

_MASK_64 = (1 << 64) - 1
_MAX_CACHED_EPOCHS = 4
_MAX_RECENT_WINDOWS = 4


@dataclass(frozen=True)
class EpochOrder:
    """Order of the shards in one epoch. `ends` are the positions after each of them."""

    shards: tuple[int, ...]
    ends: tuple[int, ...]
    window_shards: int

    @cached_property
    def window_of_shard(self) -> dict[int, int]:
        """Number of the window of each shard."""
        return {shard: rank // self.window_shards for rank, shard in enumerate(self.shards)}


@dataclass(frozen=True)
class ShardOrder:
    """Infinite shuffled order over the samples of shards.

    The sample with index i is the i-th of all shards in the order of the sources.

    >>> order = ShardOrder(seed=1, num_samples_of_shard=(2, 3, 4), window_shards=2)
    >>> sorted(order.get_index(position) for position in range(9, 18)), order.get_epoch(17)
    ([0, 1, 2, 3, 4, 5, 6, 7, 8], 1)
    """

    seed: int
    num_samples_of_shard: tuple[int, ...]
    window_shards: int
    _epoch_orders: dict[int, EpochOrder] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Index of the first sample of each shard, then the number of samples."""
        return (0, *accumulate(self.num_samples_of_shard))

    def get_epoch(self, position: int) -> int:
        """Return the epoch, from 0, of a global position."""
        return position // self.starts[-1]

    def get_index(self, position: int) -> int:
        """Return the index of the sample at a global position."""
        epoch, offset = divmod(position, self.starts[-1])
        order = self.get_epoch_order(epoch)
        rank = bisect_right(order.ends, offset)
        first = rank // self.window_shards * self.window_shards
        last = min(first + self.window_shards, len(order.shards)) - 1
        start = order.ends[first - 1] if first else 0
        size = order.ends[last] - start
        key = mix_bits(mix_bits(mix_bits(self.seed & _MASK_64) ^ epoch) ^ mix_bits(first + 1))
        shuffled = start + permute(offset - start, size, key)
        rank = bisect_right(order.ends, shuffled)
        inner = shuffled - (order.ends[rank - 1] if rank else 0)
        return self.starts[order.shards[rank]] + inner

    def get_epoch_order(self, epoch: int) -> EpochOrder:
        """Return the order of the shards in an epoch; shards without samples are left out."""
        if epoch not in self._epoch_orders:
            while len(self._epoch_orders) >= _MAX_CACHED_EPOCHS:
                self._epoch_orders.pop(next(iter(self._epoch_orders)))
            self._epoch_orders[epoch] = self._build_epoch_order(epoch)
        return self._epoch_orders[epoch]

    def _build_epoch_order(self, epoch: int) -> EpochOrder:
        counts = self.num_samples_of_shard
        used = [number for number, count in enumerate(counts) if count]
        key = mix_bits(mix_bits(self.seed & _MASK_64) ^ mix_bits(epoch) ^ 1)
        shards = tuple(used[permute(rank, len(used), key)] for rank in range(len(used)))
        ends = tuple(accumulate(counts[number] for number in shards))
        return EpochOrder(shards, ends, self.window_shards)


@dataclass
class StreamedDataset:
    """Samples of streamed shards, in the order of the sources; `numbers` are those of the shards.

    Shards of the current window stay open. While its samples are read, a thread fetches the
    shards of the next window.
    """

    index: ShardIndex
    numbers: tuple[int, ...]
    sequence_length: int
    window_shards: int
    seed: int
    _open: OrderedDict[int, OpenShard] = field(default_factory=OrderedDict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _windows_ahead: deque[tuple[int, int]] = field(
        default_factory=lambda: deque(maxlen=_MAX_RECENT_WINDOWS)
    )
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._entries = [self.index.entries[number] for number in self.numbers]
        self.order = ShardOrder(
            self.seed, tuple(entry.num_samples for entry in self._entries), self.window_shards
        )

    def __len__(self) -> int:
        return self.order.starts[-1]

    @property
    def num_supervised(self) -> int:
        """Tokens predicted in one pass over all samples."""
        return sum(entry.num_supervised for entry in self._entries)

    @cached_property
    def is_uneven(self) -> bool:
        """True if any shard is uneven."""
        return any(entry.is_uneven for entry in self._entries)

    def count_used_positions(self, index: int, epoch: int = 0) -> int:
        """Return the number of positions of sample `index` that are not padding."""
        with self._lock:
            shard, inner = self._find(index, epoch)
            assert shard.dataset is not None
            return shard.dataset.count_used_positions(inner, epoch)

    def list_document_lengths(self, index: int, epoch: int = 0) -> tuple[int, ...]:
        """Return the positions of each document of sample `index`, without padding."""
        with self._lock:
            shard, inner = self._find(index, epoch)
            assert shard.dataset is not None
            return shard.dataset.list_document_lengths(inner, epoch)

    def get_sample(self, index: int, epoch: int = 0) -> Sample:
        """Return sample `index` of `epoch`; fetch its shard if the cache does not have it.

        Raises:
            DataError: the shard cannot be fetched, or has changed.
        """
        with self._lock:
            shard, inner = self._find(index, epoch)
            assert shard.dataset is not None
            sample = shard.dataset.get_sample(inner, epoch)
        if self.index.has_weights and sample.weights is None:
            sample = sample._replace(weights=np.ones(self.sequence_length, dtype=np.float32))
        return sample

    def close_shards(self) -> None:
        """Close all shards, so that they can be removed from the cache."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def _find(self, index: int, epoch: int) -> tuple[OpenShard, int]:
        """Return the open shard of a sample and the sample's index in it."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = bisect_right(self.order.starts, index) - 1
        shard = self._open.get(number)
        if shard is None:
            while len(self._open) >= self.window_shards:
                self._open.popitem(last=False)[1].close()
            shard = self._open[number] = self.index.open(self.numbers[number])
        self._open.move_to_end(number)
        self._read_ahead(number, epoch)
        return shard, index - self.order.starts[number]

    def _read_ahead(self, number: int, epoch: int) -> None:
        """Fetch the window after shard `number`'s in the background, once."""
        order = self.order.get_epoch_order(epoch)
        window = order.window_of_shard[number]
        is_busy = self._thread is not None and self._thread.is_alive()
        if (epoch, window) in self._windows_ahead or is_busy:
            return
        self._windows_ahead.append((epoch, window))
        shards = order.shards[(window + 1) * self.window_shards :][: self.window_shards]
        if not shards:
            shards = self.order.get_epoch_order(epoch + 1).shards[: self.window_shards]
        # A daemon: the end of the process does not wait for it, and its locks end with it.
        self._thread = threading.Thread(
            target=self._build_ahead, args=(shards,), name="read-shards-ahead", daemon=True
        )
        self._thread.start()

    def _build_ahead(self, shards: Sequence[int]) -> None:
        for number in shards:
            try:
                if not self.index.build_ahead(self.numbers[number]):
                    return  # no space: the shards are fetched when they are needed
            except ShardwrightError as error:
                # Raised again when the shard is needed, if it still fails.
                logger.warning("a file could not be read ahead: %s", error)
                return
