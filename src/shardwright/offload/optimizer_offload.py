"""Offloading that a recipe's section asks for, of the moments and of trained weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import torch

from shardwright.config.offload import OffloadSection
from shardwright.offload.backward_update import BackwardUpdate, HostBackwardUpdate
from shardwright.offload.disk_store import DiskStore
from shardwright.offload.offloaded_optimizer import OffloadedOptimizer
from shardwright.offload.parameter_offload import ParameterOffload
from shardwright.offload.parameter_store import DiskParameterStore
from shardwright.offload.pinned_parameter_store import PinnedParameterStore
from shardwright.offload.state_buckets import StatePartition
from shardwright.offload.store import HostStore, Store
from shardwright.offload.store_update import StagedUpdate, StoreUpdate
from shardwright.offload.update_overlap import UpdateOverlap
from shardwright.optim.sharded_optimizer import GradientListener, ShardedModel
from shardwright.units import format_bytes


class OffloadableModel(ShardedModel, Protocol):
    """Sharded parameters whose gradients are reported; `parallel.ParallelModel` is one."""

    def watch_gradients(self, listener: GradientListener, *, may_free: bool = False) -> None:
        """Report each trained parameter's gradient of a step once it is complete."""
        ...


def offload_optimizer(
    optimizer: torch.optim.Optimizer,
    section: OffloadSection,
    model: OffloadableModel,
    *,
    device: torch.device,
    default_folder: Path,
    parameters: ParameterOffload | None = None,
    overlap: UpdateOverlap | None = None,
) -> OffloadedOptimizer:
    """Move the states of an optimizer that has taken no step to the section's tier.

    Args:
        section: Its `update_on` is `device` or `host`; `auto` is the device.
        default_folder: Folder of the scratch file if the section names none.
        parameters: Brings parameters and gradients that are elsewhere.
        overlap: Lets the next forward pass begin during the update, or updates in the backward
            pass.

    Raises:
        OffloadFailed: the disk has not enough space, or cannot be written.
    """

    has_host_update = device.type == "cuda" and section.update_on == "host"

    def create_store(partition: StatePartition) -> Store:
        is_pinned = device.type == "cuda" and not has_host_update
        if section.optimizer == "host":
            return HostStore.allocate(
                partition.segment_bytes,
                is_pinned=is_pinned,
                capacity_bytes=partition.count_device_buffers(section.device_buffer_bytes)
                * partition.max_bucket_bytes,
            )
        unit_bytes = 0 if overlap is None else _find_largest_unit(partition, overlap)
        resident_bytes = partition.select_resident_buckets(section.buffer_bytes, unit_bytes)
        return DiskStore(
            default_folder if section.dir is None else Path(section.dir),
            partition.segment_bytes,
            partition.compute_staging_bytes(section.buffer_bytes) - sum(resident_bytes.values()),
            resident_bytes=resident_bytes,
            is_pinned=is_pinned,
        )

    piecewise: Any = optimizer
    offloaded = OffloadedOptimizer(
        piecewise,
        model,
        create_store,
        bucket_bytes=section.bucket_bytes,
        should_fill_buckets=section.fills_buckets,
        device=device,
        has_host_update=has_host_update,
        parameters=parameters,
        overlap=overlap,
        device_buffer_bytes=section.device_buffer_bytes,
    )
    if offloaded.host_update is not None:
        if overlap is not None:
            overlap.follow(offloaded.host_update)
        listener: GradientListener = offloaded.host_update
        if isinstance(overlap, HostBackwardUpdate):
            listener = overlap
        model.watch_gradients(listener)
    elif isinstance(overlap, BackwardUpdate):
        model.watch_gradients(overlap, may_free=True)
    return offloaded


def _find_largest_unit(partition: StatePartition, overlap: UpdateOverlap) -> int:
    """Return the bytes of state of the largest unit but the first, for which a pass waits."""
    totals: Counter[int] = Counter()
    for (name, _), stored in partition.tensors.items():
        totals[overlap.get_unit(name)] += stored.spec.num_bytes
    return max((num_bytes for unit, num_bytes in totals.items() if unit), default=0)


def describe_offload(optimizer: OffloadedOptimizer, device: torch.device) -> str:
    """Describe in one line where a rank's moments are and what moves."""
    place = "host memory" if optimizer.tier == "host" else "a scratch file"
    line = (
        f"offload: {format_bytes(optimizer.num_bytes)} of optimizer states of this rank are in "
        f"{place}, in {optimizer.num_buckets} buckets"
    )
    if optimizer.tier == "host" and device.type == "cpu":
        return f"{line}; the device is the CPU, so its memory is the host's and nothing moves"
    if optimizer.host_update is not None:
        return (
            f"{line}; the host updates them, with {format_bytes(optimizer.host_update.num_bytes)} "
            "of pinned copies of weights and gradients"
        )
    return line


def build_parameter_offload(
    section: OffloadSection,
    *,
    device: torch.device,
    default_folder: Path,
    kind: type[ParameterOffload] = ParameterOffload,
) -> ParameterOffload | None:
    """Build the offloading of trained weights; None with `host` on a CPU, where nothing moves.

    With `host` on a GPU weights and gradients are in pinned memory. `update_on: host` updates them
    there; those on disk pass through staging memory.

    Args:
        default_folder: folder of the scratch file if the section names none.
        kind: `ShardOffload` if ZeRO shards the weights over ranks.

    Raises:
        OffloadFailed: the folder cannot be written.
    """
    has_host_update = device.type == "cuda" and section.update_on == "host"
    if section.parameters != "disk":
        if section.parameters == "none" or device.type == "cpu":
            return None
        pinned = PinnedParameterStore(device)
        return kind(pinned, "host", StoreUpdate(pinned) if has_host_update else None)
    folder = default_folder if section.dir is None else Path(section.dir)
    store = DiskParameterStore(folder, section.buffer_bytes, device)
    update = StagedUpdate(store, section.buffer_bytes, device) if has_host_update else None
    return kind(store, "disk", update)


def describe_parameter_offload(offload: ParameterOffload | None) -> str:
    """Describe in one line where the weights and gradients of a rank's blocks are."""
    if offload is None:
        return (
            "offload: weights stay: the device is the CPU, so its memory is the host's and "
            "nothing moves"
        )
    place = "a scratch file" if offload.tier == "disk" else "pinned host memory"
    return (
        f"offload: {format_bytes(offload.num_bytes)} of weights of this rank's blocks, and their "
        f"gradients, are in {place} of {format_bytes(offload.stored_bytes)}"
        f"{', and the host updates them' if offload.store_update is not None else ''}"
    )
