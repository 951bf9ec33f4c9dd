"""Buckets of state on their way between a store and the update.

While one bucket is updated, the next ones are swapped in and the last ones swapped out. Some
stay in staging memory from step to step, and are written only when the store is read.

[Note: order of reads] A store reads one bucket after another, and a read may wait for memory that
only the update of an earlier bucket frees. So buckets are requested in the order of their use.
Otherwise the update could wait for a bucket whose read is behind one that waits for the update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shardwright.offload.device_buffers import DeviceBuffers
from shardwright.offload.state_buckets import StatePartition
from shardwright.offload.store import Store, Swap, wait_for_parts


class BucketStream:
    """Buckets of a store, in the order of the update."""

    def __init__(
        self, partition: StatePartition, store: Store, device_buffers: DeviceBuffers | None
    ) -> None:
        """
        Args:
            device_buffers: Buffers where the update runs; None if it runs in the store's memory.
        """
        self._buckets = partition.buckets
        self._store = store
        self._device_buffers = device_buffers
        self.swaps: deque[Swap] = deque()
        """Open swaps of buckets that are read ahead, in the order in which they will be used."""
        self._resident_swaps: dict[int, Swap] = {}
        """Open swaps of buckets that stay in staging memory; the store has older bytes."""
        self._open_swaps: dict[int, Swap] = {}
        """All of these, by bucket."""
        self._open_bytes = 0
        """Bytes of `swaps`."""
        self._order: Sequence[int] = ()
        """Buckets of the update."""
        self._following: deque[int] = deque()
        """Those that have no open swap, in the order of their use."""
        self._unfilled: deque[int] = deque()
        """Those that have not been copied to the device."""

    def begin(self, order: Sequence[int]) -> None:
        """Begin an update of these buckets, one after another."""
        following = [index for index in order if index not in self._resident_swaps]
        if [swap.index for swap in self.swaps] != following[: len(self.swaps)] or (
            self._device_buffers is not None
            and self._device_buffers.filled != list(order[: len(self._device_buffers.filled)])
        ):
            self._release()  # other parameters have gradients than in the step before
        self._order = order
        self._request_all()

    @contextmanager
    def open_bucket(self, index: int) -> Iterator[list[Tensor]]:
        """Wait for the next bucket, and return its parts where the update runs.

        It is swapped out afterwards, and those that fit then are swapped in.
        """
        is_resident = index in self._store.resident_buckets
        swap = self._open_swaps[index]
        parts = wait_for_parts(self._store, swap)
        copied: torch.cuda.Event | None = None
        if self._device_buffers is None:
            yield parts
        else:
            self._fill()
            yield self._device_buffers.open(index)
            copied = self._device_buffers.empty(index, parts)
        if not is_resident:
            self._store.swap_out(self._close_first(), copied)
            self._request()
        self._fill()

    def end(self) -> None:
        """End an update; swap in the first buckets of the next one where that takes time."""
        if self._device_buffers is not None:
            self._device_buffers.end_step()
        if self._store.tier == "disk" or self._device_buffers is not None:
            self._request_all()

    def write_back(self) -> None:
        """Bring the store up to date and close all swaps."""
        if self._device_buffers is not None:
            self._device_buffers.synchronize()
        for swap in self._resident_swaps.values():
            self._store.swap_out(swap)
            del self._open_swaps[swap.index]
        self._resident_swaps.clear()
        self._release()

    def close(self) -> None:
        """Discard the state and free the store."""
        self.swaps.clear()
        self._resident_swaps.clear()
        self._open_swaps.clear()
        self._store.close()

    def _request_all(self) -> None:
        """Request the buckets of an update that are not on their way."""
        self._following = deque(index for index in self._order if index not in self._open_swaps)
        self._request()
        if self._device_buffers is not None:
            self._unfilled = deque(self._order[len(self._device_buffers.filled) :])
            self._fill()

    def _request(self) -> None:
        """Start to swap in the following buckets, up to the first that does not fit."""
        while self._following:
            index = self._following[0]
            bucket = self._buckets[index]
            is_resident = index in self._store.resident_buckets
            if not is_resident:
                if self._open_bytes + bucket.num_bytes > self._store.capacity_bytes:
                    return
                self._open_bytes += bucket.num_bytes
            swap = self._open_swaps[index] = self._store.swap_in(index, bucket)
            if is_resident:
                self._resident_swaps[index] = swap
            else:
                self.swaps.append(swap)
            self._following.popleft()

    def _close_first(self) -> Swap:
        """Remove the first of `swaps`."""
        swap = self.swaps.popleft()
        del self._open_swaps[swap.index]
        self._open_bytes -= swap.bucket.num_bytes
        return swap

    def _fill(self) -> None:
        """Copy the following buckets that have arrived to free buffers of the device."""
        if self._device_buffers is None:
            return
        while self._unfilled and self._device_buffers.num_free:
            swap = self._open_swaps.get(self._unfilled[0])
            if swap is None or not swap.parts.done():
                return
            self._device_buffers.fill(swap.index, swap.bucket, swap.parts.result())
            self._unfilled.popleft()

    def _release(self) -> None:
        """Give up the swaps that were begun for the next step."""
        if self._device_buffers is not None:
            self._device_buffers.discard()
        while self.swaps:
            self._store.release(self._close_first())
