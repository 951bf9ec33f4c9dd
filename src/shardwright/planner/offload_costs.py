"""Costs of offloaded state: what stays on the device, and the rates of the slower tiers."""

from __future__ import annotations

from math import inf

from shardwright.config.offload import OffloadTier
from shardwright.hardware import MeasuredProfile
from shardwright.planner.candidate import Candidate

_BYTES_PER_SECOND: dict[OffloadTier, float] = {"host": 25e9, "disk": 1e9}
"""Assumed rates per rank in each direction, both directions at the same time: of a device's PCIe
4.0 x16 link, as copies reach it, and of a disk."""
_HOST_MEMORY_BYTES_PER_SECOND = 50e9
"""Assumed rate per rank at which the CPU reads and writes host memory, both together."""


def get_transfer_rate(tier: OffloadTier, profile: MeasuredProfile | None) -> float:
    """Return the bytes per second of a tier in each direction: measured, otherwise assumed."""
    measured = None
    if profile is not None:
        tiers = profile.tiers
        measured = (
            tiers.disk_both_bytes_per_second if tier == "disk" else tiers.host_link_bytes_per_second
        )
    return measured or _BYTES_PER_SECOND[tier]


def get_host_memory_rate(profile: MeasuredProfile | None) -> float:
    """Return the bytes per second that the CPU reads and writes: measured, otherwise assumed."""
    measured = None if profile is None else profile.tiers.host_memory_bytes_per_second
    return measured or _HOST_MEMORY_BYTES_PER_SECOND


def compute_host_update_seconds(
    candidate: Candidate,
    num_elements: float,
    moved_bytes: float,
    backward_seconds: float,
    profile: MeasuredProfile | None,
) -> float:
    """Compute the seconds of an update on the host, without the norm.

    Gradients and weights leave beside the last backward pass if they are complete then. Weights
    return, and moments on disk come and go, beside the update.

    Args:
        moved_bytes: Bytes of host memory that the update reads and writes.
        backward_seconds: Time of the last backward pass.
    """
    link = get_transfer_rate("host", profile)
    weight_bytes = num_elements * candidate.master_bytes
    layout = candidate.layout
    is_early = layout.pp == 1 and (
        layout.zero_stage >= 1 or layout.dp_replicate * layout.dp_shard * layout.cp == 1
    )
    seconds = [moved_bytes / get_host_memory_rate(profile), weight_bytes / link]
    if candidate.optimizer_tier == "disk":
        state_bytes = candidate.engine.get_optimizer_bytes(
            candidate.optimizer, candidate.master_bytes
        )
        seconds.append(num_elements * state_bytes / get_transfer_rate("disk", profile))
    leaving_seconds = 2 * weight_bytes / link
    return max(seconds) + max(0.0, leaving_seconds - is_early * backward_seconds)


def count_resident_layers(candidate: Candidate, layers_per_stage: float) -> float:
    """Count the layers whose saved tensors are on the device at most; inf without offloading.

    One layer computes while another one's tensors leave or return. In a pipeline the last layer
    of the latest forward pass stays, too, until the next one begins; a stage of one layer waits
    for none to return.
    """
    if candidate.activation_offload == "none":
        return inf
    return 2.0 + (candidate.layout.pp > 1 and layers_per_stage > 1)


def compute_transfer_waits(
    candidate: Candidate,
    num_bytes: float,
    forward_seconds: float,
    backward_seconds: float,
    profile: MeasuredProfile | None,
) -> tuple[float, float]:
    """Return the seconds by which a layer's forward and backward pass are extended while
    `num_bytes` of another layer leave or return beside them."""
    if candidate.activation_offload == "none":
        return 0.0, 0.0
    seconds = num_bytes / get_transfer_rate(candidate.activation_offload, profile)
    return max(0.0, seconds - forward_seconds), max(0.0, seconds - backward_seconds)
