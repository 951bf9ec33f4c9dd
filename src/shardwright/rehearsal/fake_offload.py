"""Offloading of a rehearsal: stores without memory, whose bytes are not the device's.

The engine's own code moves the tensors, so what stays on the device is what stays there in a run.
Staging buffers are allocated: three for states, on the device of the update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.config import Recipe
from shardwright.config.offload import OffloadSection
from shardwright.offload import (
    ActivationOffload,
    OffloadedOptimizer,
    ParameterOffload,
    ShardOffload,
    WeightOffload,
)
from shardwright.offload.activation_store import Wait
from shardwright.offload.staging_buffer import compute_staging_buffer_bytes
from shardwright.offload.state_buckets import PAGE_BYTES, StatePartition
from shardwright.offload.store import HostStore, Store, TransferCounts
from shardwright.offload.store_update import StoreUpdate
from shardwright.offload.weight_store import WeightRange
from shardwright.parallel import ParallelModel
from shardwright.planner.update_place import choose_update_place
from shardwright.rehearsal.live_memory import LiveMemoryTracker


class _CountingStore:
    """Store of saved tensors that keeps only their sizes and allocates them again on return."""

    def __init__(self, device: torch.device, staging_bytes: int) -> None:
        self.counts = TransferCounts()
        self._device = device
        self._staging = torch.empty(staging_bytes, dtype=torch.uint8, device=device)

    def write(self, data: Tensor) -> tuple[int, Wait]:
        """Count the bytes of a tensor that leaves."""
        self.counts.written_bytes += data.numel()
        return data.numel(), _return_at_once

    def read(self, place: Any, num_bytes: int) -> tuple[Tensor, Wait]:
        """Allocate the memory of a tensor that returns."""
        self.counts.read_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device), _return_at_once

    def free(self, place: Any) -> None:
        """Nothing has to be freed."""

    def close(self) -> None:
        """Nothing has to be freed."""


def _return_at_once() -> None:
    """Wait for a copy that takes no time."""


class _CountingWeightStore:
    """Store of frozen weights that keeps only their sizes."""

    def __init__(self, device: torch.device, staging_bytes: int) -> None:
        self.counts = TransferCounts()
        self._staging = torch.empty(staging_bytes, dtype=torch.uint8, device=device)

    def add(self, num_bytes: int, ranges: Sequence[WeightRange]) -> int:
        """Return the bytes of a block; their values are not read."""
        return num_bytes

    def read(self, place: int, target: Tensor) -> Wait:
        """Count the bytes of a block that arrives."""
        self.counts.read_bytes += place
        return _return_at_once

    def close(self) -> None:
        """Nothing has to be freed."""


class _CountingParameterStore:
    """Store of trained weights and gradients that keeps only their sizes."""

    def __init__(self, device: torch.device, staging_bytes: int, live: LiveMemoryTracker) -> None:
        self.counts = TransferCounts()
        self.num_bytes = 0
        self._device = device
        self._live = live
        self._staging = torch.empty(staging_bytes, dtype=torch.uint8, device=device)

    def add(self, num_bytes: int) -> int:
        """Reserve a place; return its first byte."""
        first = self.num_bytes
        self.num_bytes += -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        return first

    def fill(self, position: int, pieces: Iterable[Tensor]) -> None:
        """Leave the place as it is; the values are not read."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocate bytes on the device, `[N]`."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def read(self, position: int, target: Tensor) -> Wait:
        """Count bytes that arrive."""
        self.counts.read_bytes += target.numel()
        return _return_at_once

    def write(self, position: int, source: Tensor) -> Wait:
        """Count bytes that leave; their memory is in use until the wait, as in a run."""
        self.counts.written_bytes += source.nbytes
        return lambda _source=source: _return_at_once()  # type: ignore[misc]

    def synchronise(self) -> None:
        """Wait for copies that take no time."""

    def view(self, position: int, num_bytes: int) -> Tensor:
        """Return bytes for an update in the store; they are not the device's memory."""
        with self._live.exclude_new_tensors():
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def close(self) -> None:
        """Nothing has to be freed."""


def build_fake_weight_offload(
    recipe: Recipe, device: torch.device, live: LiveMemoryTracker, *, is_sharded: bool
) -> WeightOffload | ParameterOffload | None:
    """Build the offloading of blocks' weights without a store; None if nothing moves.

    The buffers of a scratch file are host memory, which is the device's on a CPU.

    Args:
        is_sharded: True if ZeRO shards parameters over ranks.
    """
    section = recipe.moved_offload
    if section.parameters == "none":
        return None
    is_on_cpu = recipe.run.device == "cpu" and section.parameters == "disk"
    staging_bytes = compute_staging_buffer_bytes(section.buffer_bytes) if is_on_cpu else 0
    if recipe.adapters is None:
        store = _CountingParameterStore(device, 2 * staging_bytes, live)
        kind = ShardOffload if is_sharded else ParameterOffload
        has_host_update = choose_update_place(recipe).place == "host"
        return kind(store, section.parameters, StoreUpdate(store) if has_host_update else None)
    return WeightOffload(_CountingWeightStore(device, staging_bytes), section.parameters, device)


def build_fake_activation_offload(recipe: Recipe, device: torch.device) -> ActivationOffload | None:
    """Build the offloading of saved tensors without a store; None if nothing moves.

    The buffers of a scratch file are host memory, which is the device's on a CPU.
    """
    section = recipe.moved_offload
    if section.activations == "none":
        return None
    is_on_cpu = recipe.run.device == "cpu"
    staging_bytes = 2 * compute_staging_buffer_bytes(section.buffer_bytes) if is_on_cpu else 0
    return ActivationOffload(_CountingStore(device, staging_bytes), section.activations, device)


def build_fake_offloaded_optimizer(
    optimizer: torch.optim.Optimizer,
    section: OffloadSection,
    model: ParallelModel,
    live: LiveMemoryTracker,
    *,
    is_on_cpu: bool,
    is_updated_on_host: bool = False,
    parameters: ParameterOffload | None = None,
) -> tuple[OffloadedOptimizer, Tensor]:
    """Build the optimizer with its states outside the counted memory, and its staging buffers.

    The states are fake tensors of the parameters' device, so that their update runs there; it
    allocates nothing. An update on the host has no buffers on the device.
    """
    device = model.device

    staging_bytes = 0

    def create_store(partition: StatePartition) -> Store:
        nonlocal staging_bytes
        if is_on_cpu:
            staging_bytes = partition.compute_staging_bytes(section.buffer_bytes)
        elif not is_updated_on_host:
            num_buffers = partition.count_device_buffers(section.device_buffer_bytes)
            staging_bytes = num_buffers * partition.max_bucket_bytes
        with live.exclude_new_tensors():
            segments = [
                torch.empty(size, dtype=torch.uint8, device=device)
                for size in partition.segment_bytes
            ]
        return HostStore(segments)

    piecewise: Any = optimizer
    offloaded = OffloadedOptimizer(
        piecewise,
        model,
        create_store,
        bucket_bytes=section.bucket_bytes,
        should_fill_buckets=section.fills_buckets,
        device=torch.device("cpu"),  # no copies: the segments are where the update runs
        parameters=parameters,
    )
    return offloaded, torch.empty(staging_bytes, dtype=torch.uint8, device=device)


def sum_by_tier(
    recipe: Recipe,
    optimizer_bytes: int,
    activation_bytes: int,
    weight_offload: WeightOffload | ParameterOffload | None,
) -> Counter[str]:
    """Sum what is offloaded by tier, in bytes, with the staging memory of an update on the host."""
    offload = recipe.moved_offload
    by_tier: Counter[str] = Counter({offload.optimizer: optimizer_bytes})
    by_tier[offload.activations] += activation_bytes
    if weight_offload is not None:
        by_tier[offload.parameters] += weight_offload.stored_bytes
    if isinstance(weight_offload, ParameterOffload):
        by_tier["host"] += weight_offload.count_staging_bytes(offload.buffer_bytes)
    return by_tier
