"""Offloading: state that is moved between the device and slower tiers, host memory or disk."""

from shardwright.offload.offloaded_optimizer import (
    OffloadedOptimizer,
    describe_offload,
    describe_transfers,
    offload_optimizer,
)
from shardwright.offload.store import TransferCounts

__all__ = [
    "OffloadedOptimizer",
    "TransferCounts",
    "describe_offload",
    "describe_transfers",
    "offload_optimizer",
]
