"""Costs of offloaded state: what stays on the device, and the rates of the slower tiers."""

from __future__ import annotations

from math import inf

from shardwright.config.offload import OffloadTier
from shardwright.planner.candidate import Candidate

_BYTES_PER_SECOND: dict[OffloadTier, float] = {"host": 25e9, "disk": 1e9}
"""Assumed rates per rank in each direction, both directions at the same time: of a device's PCIe
4.0 x16 link, as copies reach it, and of a disk."""


def get_transfer_rate(tier: OffloadTier) -> float:
    """Return the bytes per second of a tier in each direction."""
    return _BYTES_PER_SECOND[tier]


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
    candidate: Candidate, num_bytes: float, forward_seconds: float, backward_seconds: float
) -> tuple[float, float]:
    """Return the seconds by which a layer's forward and backward pass are extended while
    `num_bytes` of another layer leave or return beside them."""
    if candidate.activation_offload == "none":
        return 0.0, 0.0
    seconds = num_bytes / get_transfer_rate(candidate.activation_offload)
    return max(0.0, seconds - forward_seconds), max(0.0, seconds - backward_seconds)
