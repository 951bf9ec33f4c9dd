"""The machine around the devices: cores, memory, shared memory, limits, NUMA."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from shardwright.probe.finding import Finding
from shardwright.units import GIB_BYTES, format_bytes

SECTION = "host"

_FEWEST_FILES = 4096
"""Open files that loaders, sockets of every group and checkpoints may want together."""
_LEAST_SHARED_MEMORY = GIB_BYTES
"""Of /dev/shm: NCCL and loaders keep buffers there; a container's default is 64 MiB."""
_UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True)
class Host:
    """One machine as one of its ranks sees it. None where the system does not tell."""

    name: str
    cores: int
    """That this process may run on."""
    core_quota: float | None
    """Cores' worth of time that the container may use."""
    load: float
    """Processes that wanted to run, mean of the last minute."""
    memory_bytes: int
    available_bytes: int
    container_bytes: int | None
    shared_memory_bytes: int | None
    open_files: int
    locked_bytes: int
    numa_nodes: int
    governor: str | None


def read_host(name: str) -> Host:
    """Of this process's machine."""
    memory = psutil.virtual_memory()
    shm = Path("/dev/shm")
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    return Host(
        name=name,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        core_quota=_core_quota(),
        load=os.getloadavg()[0],
        memory_bytes=memory.total,
        available_bytes=memory.available,
        container_bytes=_container_bytes(memory.total),
        shared_memory_bytes=shutil.disk_usage(shm).total if shm.is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        numa_nodes=max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
        governor=governor.read_text().strip() if governor.is_file() else None,
    )


def _read_number(path: str) -> int | None:
    try:
        return int(Path(path).read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _core_quota() -> float | None:
    """Of the control group, version 2 or 1."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        old, every = (_read_number(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
        return old / every if old is not None and old > 0 and every else None


def _container_bytes(total: int) -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = _read_number(path)
        if limit is not None and limit < total:  # version 1 says a number beyond any memory for none
            return limit
    return None


def judge_hosts(hosts: Mapping[str, tuple[Host, int]], *, cuda: bool) -> list[Finding]:
    """Each machine, with the number of ranks on it; alike machines are told as one."""
    findings: list[Finding] = []
    for host, num_ranks in hosts.values():
        findings += _judge_host(host, num_ranks, cuda=cuda, several=len(hosts) > 1)
    passed: dict[tuple[str, str], int] = {}
    kept = []
    for finding in findings:
        alike = (finding.name.partition(" @ ")[0], finding.value)
        if finding.verdict == "pass" and alike in passed:
            passed[alike] += 1
            continue
        passed.setdefault(alike, 1)
        kept.append(finding)
    return kept


def _judge_host(host: Host, num_ranks: int, *, cuda: bool, several: bool) -> list[Finding]:
    found = [
        _judge_cores(host, num_ranks),
        _line(
            "other work",
            host.load <= host.cores + num_ranks,
            f"load {host.load:.1f} on {host.cores} cores before the examination",
            "Rates below are those of a busy machine: stop what else runs here, then examine again",
            load=host.load,
        ),
        _judge_memory(host),
        _line(
            "open files",
            host.open_files >= _FEWEST_FILES or host.open_files == _UNLIMITED,
            f"at most {host.open_files if host.open_files != _UNLIMITED else 'unlimited'}",
            f"ulimit -n {_FEWEST_FILES * 16} (or LimitNOFILE of the service that starts jobs)",
            open_files=host.open_files,
        ),
    ]
    if host.shared_memory_bytes is not None:
        found.append(_judge_shared_memory(host.shared_memory_bytes, num_ranks))
    if cuda and several:
        found.append(_judge_locked_memory(host))
    if host.governor is not None and not cuda:
        remedy = "cpupower frequency-set -g performance"
        found.append(_line("clock governor", host.governor != "powersave", host.governor, remedy))
    return [replace(finding, name=f"{finding.name} @ {host.name}") for finding in found] if several else found


def _line(name: str, fine: bool, value: str, remedy: str, **numbers: float | None) -> Finding:
    """Passes where it is fine, else warns and says what to do."""
    return Finding(SECTION, name, "pass" if fine else "warn", value, "" if fine else remedy, numbers)


def _judge_cores(host: Host, num_ranks: int) -> Finding:
    cores = min(host.cores, host.core_quota or host.cores)
    quota = f", of which the container may use {host.core_quota:g}" if host.core_quota else ""
    numa = f", {host.numa_nodes} NUMA nodes" if host.numa_nodes > 1 else ""
    return _line(
        "cores",
        num_ranks <= cores,
        f"{host.cores} cores{quota}{numa} for {num_ranks} rank{'s' * (num_ranks != 1)}",
        f"Start at most {max(1, int(cores))} ranks here, or give the job more cores (--cpus-per-task)",
        cores=cores,
        numa_nodes=host.numa_nodes,
    )


def _judge_memory(host: Host) -> Finding:
    limit = host.container_bytes or host.memory_bytes
    available = min(host.available_bytes, limit)
    return _line(
        "memory",
        available > 0.1 * limit,
        f"{format_bytes(available)} free of {format_bytes(limit)}" + (" (the container's)" if host.container_bytes else ""),
        "Stop what holds it (ps aux --sort=-rss), or raise the container's limit",
        available_bytes=available,
        limit_bytes=limit,
    )


def _judge_shared_memory(num_bytes: int, num_ranks: int) -> Finding:
    return _line(
        "/dev/shm",
        num_bytes >= _LEAST_SHARED_MEMORY or num_ranks == 1,
        format_bytes(num_bytes),
        "docker run --shm-size=16g, or an emptyDir of medium Memory at /dev/shm: NCCL keeps its buffers there",
        shared_memory_bytes=num_bytes,
    )


def _judge_locked_memory(host: Host) -> Finding:
    unlimited = host.locked_bytes == _UNLIMITED
    return _line(
        "locked memory",
        unlimited,
        "unlimited" if unlimited else format_bytes(host.locked_bytes),
        "ulimit -l unlimited: InfiniBand registers the buffers that it sends from",
        locked_bytes=host.locked_bytes,
    )
