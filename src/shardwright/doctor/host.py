"""The machine around the devices: cores, memory, shared memory, limits, NUMA."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from shardwright.doctor.finding import Finding
from shardwright.hardware.host_cpu import read_core_quota
from shardwright.hardware.host_memory import read_available_memory, read_total_memory
from shardwright.units import GIB_BYTES, format_bytes, format_items

SECTION = "host"

_MIN_OPEN_FILES = 4096
"""Open files that loaders, sockets of all groups and checkpoints may need together."""
_MIN_SHARED_MEMORY_BYTES = GIB_BYTES
"""Bytes of /dev/shm, for buffers of NCCL and loaders; a container's default is 64 MiB."""
_UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True)
class Host:
    """State of a machine as one of its ranks sees it; None for unavailable values."""

    name: str
    num_cores: int
    """Number of cores on which this process may run."""
    core_quota: float | None
    """CPU limit of the container in cores."""
    load_average: float
    """Load average of the last minute."""
    memory_bytes: int
    available_bytes: int
    container_limit_bytes: int | None
    shared_memory_bytes: int | None
    max_open_files: int
    max_locked_bytes: int
    num_numa_nodes: int
    cpu_governor: str | None


def read_host(name: str) -> Host:
    """Read the state of this process's machine."""
    memory = psutil.virtual_memory()
    limit = read_total_memory() or memory.total
    available = read_available_memory()
    shm = Path("/dev/shm")
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    return Host(
        name=name,
        num_cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        core_quota=read_core_quota(),
        load_average=os.getloadavg()[0],
        memory_bytes=memory.total,
        available_bytes=memory.available if available is None else available,
        container_limit_bytes=limit if limit < memory.total else None,
        shared_memory_bytes=shutil.disk_usage(shm).total if shm.is_dir() else None,
        max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        max_locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        num_numa_nodes=max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
        cpu_governor=governor.read_text().strip() if governor.is_file() else None,
    )


def judge_hosts(hosts: Mapping[str, tuple[Host, int]], *, has_cuda: bool) -> list[Finding]:
    """Judge each machine with its number of ranks; equal passing findings appear once."""
    findings: list[Finding] = []
    for host, num_ranks in hosts.values():
        findings += _judge_host(
            host, num_ranks, has_cuda=has_cuda, has_several_hosts=len(hosts) > 1
        )
    passed: dict[tuple[str, str], int] = {}
    shown = []
    for finding in findings:
        key = (finding.name.partition(" @ ")[0], finding.value)
        if finding.verdict == "pass" and key in passed:
            passed[key] += 1
            continue
        passed.setdefault(key, 1)
        shown.append(finding)
    return shown


def _judge_host(
    host: Host, num_ranks: int, *, has_cuda: bool, has_several_hosts: bool
) -> list[Finding]:
    findings = [
        _judge_cores(host, num_ranks),
        _build_finding(
            "other work",
            host.load_average <= host.num_cores + num_ranks,
            f"load {host.load_average:.1f} on {host.num_cores} cores before the examination",
            "The rates below are those of a busy machine: stop other work, run doctor again",
            load=host.load_average,
        ),
        _judge_memory(host),
        _build_finding(
            "open files",
            host.max_open_files >= _MIN_OPEN_FILES or host.max_open_files == _UNLIMITED,
            f"at most {host.max_open_files if host.max_open_files != _UNLIMITED else 'unlimited'}",
            f"ulimit -n {_MIN_OPEN_FILES * 16}, or LimitNOFILE of the service that starts jobs",
            open_files=host.max_open_files,
        ),
    ]
    if host.shared_memory_bytes is not None:
        findings.append(_judge_shared_memory(host.shared_memory_bytes, num_ranks))
    if has_cuda and has_several_hosts:
        findings.append(_judge_locked_memory(host))
    if host.cpu_governor is not None and not has_cuda:
        remedy = "cpupower frequency-set -g performance"
        findings.append(
            _build_finding(
                "clock governor", host.cpu_governor != "powersave", host.cpu_governor, remedy
            )
        )
    return (
        [replace(finding, name=f"{finding.name} @ {host.name}") for finding in findings]
        if has_several_hosts
        else findings
    )


def _build_finding(
    name: str, is_ok: bool, value: str, remedy: str, **numbers: float | None
) -> Finding:
    """Build a finding that passes, or warns with the remedy."""
    return Finding(
        SECTION, name, "pass" if is_ok else "warn", value, "" if is_ok else remedy, numbers
    )


def _judge_cores(host: Host, num_ranks: int) -> Finding:
    cores = min(host.num_cores, host.core_quota or host.num_cores)
    quota = f", of which the container may use {host.core_quota:g}" if host.core_quota else ""
    numa = f", {host.num_numa_nodes} NUMA nodes" if host.num_numa_nodes > 1 else ""
    return _build_finding(
        "cores",
        num_ranks <= cores,
        f"{host.num_cores} cores{quota}{numa} for {format_items(num_ranks, 'rank')}",
        f"Start at most {max(1, int(cores))} ranks here, or request more (--cpus-per-task)",
        cores=cores,
        numa_nodes=host.num_numa_nodes,
    )


def _judge_memory(host: Host) -> Finding:
    limit = host.container_limit_bytes or host.memory_bytes
    available = min(host.available_bytes, limit)
    return _build_finding(
        "memory",
        available > 0.1 * limit,
        f"{format_bytes(available)} free of {format_bytes(limit)}"
        + (" (limit of the container)" if host.container_limit_bytes else ""),
        "Stop processes that use it (ps aux --sort=-rss), or raise the container's limit",
        available_bytes=available,
        limit_bytes=limit,
    )


def _judge_shared_memory(num_bytes: int, num_ranks: int) -> Finding:
    return _build_finding(
        "/dev/shm",
        num_bytes >= _MIN_SHARED_MEMORY_BYTES or num_ranks == 1,
        format_bytes(num_bytes),
        "NCCL needs it for buffers: docker run --shm-size=16g, or an emptyDir of medium Memory",
        shared_memory_bytes=num_bytes,
    )


def _judge_locked_memory(host: Host) -> Finding:
    is_unlimited = host.max_locked_bytes == _UNLIMITED
    return _build_finding(
        "locked memory",
        is_unlimited,
        "unlimited" if is_unlimited else format_bytes(host.max_locked_bytes),
        "InfiniBand locks its send buffers: ulimit -l unlimited",
        locked_bytes=host.max_locked_bytes,
    )
