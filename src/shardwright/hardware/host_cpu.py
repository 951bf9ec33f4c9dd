"""Cores of this machine, and guessed rates of CPU ranks that run on them. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardwright.hardware.cluster_spec import Accelerator, Cluster
from shardwright.hardware.control_groups import list_control_groups
from shardwright.hardware.host_memory import read_total_memory

_ANY_CPU = re.compile(r"\s*(\d+\s*[x*]\s*)?cpu\s*", re.IGNORECASE)
"""A node of CPU ranks that names no model."""
_CATALOGUE_CORES = 96
"""Cores of the catalogue's CPU, EPYC 9654 (`catalog/epyc-9654.yaml`)."""
_CORE_BYTES_PER_SECOND = 1.5e10
"""Rate at which one core copies: 14 to 20 GB/s in docs/benchmarks/layouts-predicted.json."""
_SMALL_SOCKET_BYTES_PER_SECOND = 5e10
"""Memory rate of a socket of few cores: two channels of DDR4-3200."""
_EMULATED_SHARE = 0.03
"""Rate of bf16 products over fp32's on a CPU without instructions for them (`numerics.bf16`)."""
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Flags of /proc/cpuinfo, the last one on Arm."""


def guess_host(cluster: Cluster, node: str) -> Cluster:
    """Return the cluster with this machine's cores and memory, in equal shares for its ranks.

    Another cluster is returned unchanged: of GPUs, with a measured profile, of several nodes, or
    whose `node` names a model of CPU. Rates are those of as many cores of the catalogue's CPU.
    All processes of a machine guess the same, whatever cores they are bound to.
    """
    is_here = cluster.accelerator.kind == "cpu" and cluster.num_nodes == 1
    if not is_here or cluster.profile is not None or _ANY_CPU.fullmatch(node) is None:
        return cluster
    num_cores = count_host_cores()
    socket = cluster.accelerator
    share = num_cores / _CATALOGUE_CORES
    peaks = {name: share * rate for name, rate in socket.peak_flops_per_second.items()}
    if not _has_bf16_instructions():
        peaks["bf16"] = _EMULATED_SHARE * peaks["fp32"]
    host = replace(
        socket,
        name="CPU",
        memory_bytes=read_total_memory() or socket.memory_bytes,
        memory_bytes_per_second=max(
            min(num_cores * _CORE_BYTES_PER_SECOND, _SMALL_SOCKET_BYTES_PER_SECOND),
            share * socket.memory_bytes_per_second,
        ),
        peak_flops_per_second=peaks,
    )
    return replace(
        cluster,
        accelerator=divide_host(host, cluster.gpus_per_node),
        num_host_cores=num_cores,
    )


def divide_host(accelerator: Accelerator, num_shares: float) -> Accelerator:
    """Return one of equal shares of a CPU's memory and rates."""
    return replace(
        accelerator,
        memory_bytes=int(accelerator.memory_bytes / num_shares),
        memory_bytes_per_second=accelerator.memory_bytes_per_second / num_shares,
        peak_flops_per_second={
            name: rate / num_shares for name, rate in accelerator.peak_flops_per_second.items()
        },
    )


def count_host_cores() -> float:
    """Count the cores of this machine, or those that its container may use."""
    return min(float(os.cpu_count() or 1), read_core_quota() or float("inf"))


def read_core_quota() -> float | None:
    """Read the CPU limit of the control groups, version 2 or 1, in cores; None without one."""
    quotas = [
        quota
        for folder in list_control_groups("cpu")
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        if (quota := _read_quota(folder, names)) is not None
    ]
    return min(quotas, default=None)


def read_processor_name() -> str | None:
    """Read the model of this machine's CPU; None if the system does not name it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(filter(None, names), None)


def _read_quota(folder: Path, names: Sequence[str]) -> float | None:
    """Read quota and period of a group, from one file or two; None without a limit."""
    try:
        words = " ".join((folder / name).read_text() for name in names).split()
        quota, period = (int(word) for word in words)
    except (OSError, ValueError):  # no such file, or the quota is `max`
        return None
    return quota / period if quota > 0 and period > 0 else None


def _has_bf16_instructions() -> bool:
    try:
        return not _BF16_FLAGS.isdisjoint(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
