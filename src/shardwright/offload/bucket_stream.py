"""Buckets of state on their way between a store and the update.

While one bucket is updated, the next ones are swapped in and the last ones swapped out. Some
stay in staging memory from step to step, and are written only when the store is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardwright.offload.device_buffers import DeviceBuffers
from shardwright.offload.state_buckets import StateBucket, StatePartition
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

    def run(self, order: Sequence[int]) -> Iterator[tuple[StateBucket, list[Tensor]]]:
        """Yield buckets with their parts where the update runs; swap each out when it is done.

        The first buckets of the next step are swapped in at the end of this one.
        """
        moving = [index for index in order if index not in self._store.resident_buckets]
        if [swap.index for swap in self.swaps] != moving[: len(self.swaps)]:
            self._release()  # other parameters have gradients than in the step before
        if self._device_buffers is not None:
            self._device_buffers.begin_step()
        num_requested = len(self.swaps)
        for index in order:
            num_requested += self._request(moving[num_requested:])
            is_resident = index in self._store.resident_buckets
            swap = self._get_resident_swap(index) if is_resident else self.swaps.popleft()
            parts = wait_for_parts(self._store, swap)
            copied: torch.cuda.Event | None = None
            if self._device_buffers is None:
                yield swap.bucket, parts
            else:
                device_parts = self._device_buffers.copy_in(swap.bucket, parts)
                yield swap.bucket, device_parts
                copied = self._device_buffers.copy_out(device_parts, parts)
            if not is_resident:
                self._store.swap_out(swap, copied)
        if self._device_buffers is not None:
            self._device_buffers.end_step()
        if self._store.tier == "disk":
            self._request(moving)

    def write_back(self) -> None:
        """Bring the store up to date and close all swaps."""
        if self._device_buffers is not None:
            self._device_buffers.synchronize()
        for swap in self._resident_swaps.values():
            self._store.swap_out(swap)
        self._resident_swaps.clear()
        self._release()

    def close(self) -> None:
        """Discard the state and free the store."""
        self.swaps.clear()
        self._resident_swaps.clear()
        self._store.close()

    def _get_resident_swap(self, index: int) -> Swap:
        if index not in self._resident_swaps:
            self._resident_swaps[index] = self._store.swap_in(index, self._buckets[index])
        return self._resident_swaps[index]

    def _request(self, order: Sequence[int]) -> int:
        """Start to swap in the next buckets that fit next to the open ones; return their number."""
        free_bytes = self._store.capacity_bytes - sum(swap.bucket.num_bytes for swap in self.swaps)
        for count, index in enumerate(order):
            bucket = self._buckets[index]
            free_bytes -= bucket.num_bytes
            if free_bytes < 0:
                return count
            self.swaps.append(self._store.swap_in(index, bucket))
        return len(order)

    def _release(self) -> None:
        """Give up the swaps that were begun for the next step."""
        while self.swaps:
            self._store.release(self.swaps.popleft())
