"""Control groups (cgroups) of this process, which limit its memory and cores. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def list_control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's groups and of their parents, each of which may set a
    limit: of version 2, then of version 1.

    A container sees its own group as the root. Slurm and systemd limit a group below it.

    Args:
        controller: Name in version 1: `memory` or `cpu`.
    """
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        lines = []
    paths: dict[str, str] = {}
    for line in lines:
        _, names, path = line.split(":", 2)
        paths |= dict.fromkeys(names.split(","), path)
    for root, name in ((_ROOT, ""), (_ROOT / controller, controller)):
        own = root / paths.get(name, "").lstrip("/")
        # A container may name a path of its host, which is not visible: its root still is.
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))
