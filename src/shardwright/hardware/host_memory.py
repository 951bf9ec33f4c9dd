"""Host memory of this machine. No torch."""

from __future__ import annotations

from pathlib import Path

from shardwright.hardware.control_groups import list_control_groups

_MEMINFO = Path("/proc/meminfo")
_CONTROL_GROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Limit and usage in bytes, of version 2 and 1."""


def read_total_memory() -> int | None:
    """Read the bytes of this machine's memory, or of its control group's limit if that is less;
    None where that is unknown."""
    total = _read_machine("MemTotal")
    return None if total is None else min([total, *(limit for limit, _ in _list_limits())])


def read_available_memory() -> int | None:
    """Read how many bytes of host memory can be allocated; None where that is unknown.

    The smaller of the machine's and the control group's.
    """
    available = _read_machine("MemAvailable")
    if available is None:
        return None
    return min([available, *(limit - used for limit, used in _list_limits())])


def _read_machine(name: str) -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None
    )


def _list_limits() -> list[tuple[int, int]]:
    """Return limit and used bytes of each group with a limit; version 1 without one has a huge
    one."""
    limits = []
    for folder in list_control_groups("memory"):
        for limit_name, used_name in _CONTROL_GROUP_FILES:
            try:
                limit = int((folder / limit_name).read_text())
                used = int((folder / used_name).read_text()) - _read_reclaimable(folder)
                limits.append((limit, used))
            except (OSError, ValueError):  # no such file, or the limit is `max`
                continue
    return limits


def _read_reclaimable(folder: Path) -> int:
    """Read the bytes of cached files that the kernel drops first when memory is needed."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    statistics = dict(line.split() for line in lines)
    # In version 1, only the first one includes the groups below.
    return int(statistics.get("total_inactive_file") or statistics.get("inactive_file") or 0)
