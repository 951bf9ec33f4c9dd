"""Offloading: state that is moved between the device and slower tiers, host memory or disk."""

from shardwright.offload.offloaded_optimizer import (
    OffloadedOptimizer,
    describe_offload,
    offload_optimizer,
)

__all__ = ["OffloadedOptimizer", "describe_offload", "offload_optimizer"]
