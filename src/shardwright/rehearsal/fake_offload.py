"""Offloading of a rehearsal: stores without memory, whose bytes are not the device's.

The engine's own code moves the tensors, so what stays on the device is what stays there in a run.
Staging buffers are allocated: three for states, on the device of the update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.config import Recipe
from shardwright.config.offload import OffloadSection
from shardwright.offload import ActivationOffload, OffloadedOptimizer
from shardwright.offload.activation_store import Wait
from shardwright.offload.device_buffers import NUM_BUFFERS
from shardwright.offload.state_buckets import StatePartition
from shardwright.offload.store import HostStore, Store, TransferCounts
from shardwright.parallel import ParallelModel
from shardwright.rehearsal.live_memory import LiveMemoryTracker


class _CountingStore:
    """Store of saved tensors that keeps only their sizes. What returns is allocated again."""

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


def build_fake_activation_offload(recipe: Recipe, device: torch.device) -> ActivationOffload | None:
    """Build the offloading of saved tensors without a store; None if nothing moves.

    The buffers of a scratch file are host memory, which is the device's on a CPU.
    """
    section = recipe.moved_offload
    if section.activations == "none":
        return None
    staging_bytes = 2 * section.buffer_bytes if recipe.run.device == "cpu" else 0
    return ActivationOffload(_CountingStore(device, staging_bytes), section.activations, device)


def build_fake_offloaded_optimizer(
    optimizer: torch.optim.Optimizer,
    section: OffloadSection,
    model: ParallelModel,
    live: LiveMemoryTracker,
    *,
    is_updated_on_host: bool = False,
) -> tuple[OffloadedOptimizer, Tensor]:
    """Build the optimizer with its states outside the counted memory, and its staging buffers.

    The states are fake tensors of the parameters' device, so that their update runs there; it
    allocates nothing. An update on the host has no buffers on the device.
    """
    device = model.device

    largest_bucket_bytes = 0

    def create_store(partition: StatePartition) -> Store:
        nonlocal largest_bucket_bytes
        largest_bucket_bytes = partition.max_bucket_bytes
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
        buffer_bytes=section.buffer_bytes,
        device=torch.device("cpu"),  # no copies: the segments are where the update runs
    )
    staging_bytes = min(NUM_BUFFERS * largest_bucket_bytes, offloaded.num_bytes)
    if is_updated_on_host:
        staging_bytes = 0
    return offloaded, torch.empty(staging_bytes, dtype=torch.uint8, device=device)
