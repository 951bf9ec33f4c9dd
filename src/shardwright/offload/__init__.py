"""Offloading: state that is moved between the device and slower tiers, host memory or disk."""

from shardwright.offload.activation_offload import (
    ActivationOffload,
    build_activation_offload,
    describe_activation_offload,
)
from shardwright.offload.backward_update import BackwardUpdate, HostBackwardUpdate
from shardwright.offload.offloaded_optimizer import OffloadedOptimizer
from shardwright.offload.optimizer_offload import (
    build_parameter_offload,
    describe_offload,
    describe_parameter_offload,
    offload_optimizer,
)
from shardwright.offload.parameter_offload import ParameterOffload
from shardwright.offload.shard_offload import ShardOffload
from shardwright.offload.store import TransferCounts, describe_transfers
from shardwright.offload.update_overlap import (
    DeferredUpdate,
    HostDeferredUpdate,
    StreamedUpdate,
    UpdateOverlap,
)
from shardwright.offload.weight_offload import (
    WeightOffload,
    build_weight_offload,
    describe_weight_offload,
)
