"""Offloading: state that is moved between the device and slower tiers, host memory or disk."""

from shardwright.offload.activation_offload import (
    ActivationOffload,
    build_activation_offload,
    describe_activation_offload,
)
from shardwright.offload.offloaded_optimizer import (
    OffloadedOptimizer,
    describe_offload,
    describe_transfers,
    offload_optimizer,
)
from shardwright.offload.store import TransferCounts

__all__ = [
    "ActivationOffload",
    "OffloadedOptimizer",
    "TransferCounts",
    "build_activation_offload",
    "describe_activation_offload",
    "describe_offload",
    "describe_transfers",
    "offload_optimizer",
]
