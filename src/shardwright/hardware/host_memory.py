"""Host memory of this machine. No torch."""

from __future__ import annotations

from pathlib import Path

_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def read_total_memory() -> int | None:
    """Read the bytes of this machine's memory, or of the container's limit if that is less; None
    where that is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    limits = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")]
    for limit_path, _ in _CGROUP_FILES:
        try:
            limits.append(int(Path(limit_path).read_text()))
        except (OSError, ValueError):  # no such cgroup, or the limit is `max`
            continue
    return min(limits, default=None)


def read_available_memory() -> int | None:
    """Read how many bytes of host memory can be allocated; None where that is unknown.

    The smaller of the machine's and the container's (cgroup).
    """
    limits = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for limit_path, usage_path in _CGROUP_FILES:
        try:
            limits.append(int(Path(limit_path).read_text()) - int(Path(usage_path).read_text()))
        except (OSError, ValueError):  # no such cgroup, or the limit is `max`
            continue
    return min(limits, default=None)
