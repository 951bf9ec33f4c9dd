"""File systems of a folder: those that are too slow for scratch files, or are memory themselves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

_NETWORK_FILE_SYSTEMS = (
    "nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "9p", "gpfs", "beegfs", "afs", "fuse",
)  # fmt: skip
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


def read_file_system(folder: Path) -> str:
    """Return the type of the file system of a folder; empty if it is unknown."""
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == wanted:
            return rest.split()[0]
    return ""


def classify_file_system(kind: str) -> Literal["network", "memory", "local"]:
    """Return the medium of a file system type; unknown types count as local.

    >>> [classify_file_system(kind) for kind in ("nfs4", "fuse.sshfs", "tmpfs", "ext4", "")]
    ['network', 'network', 'memory', 'local', 'local']
    """
    if kind.partition(".")[0] in _NETWORK_FILE_SYSTEMS:
        return "network"
    return "memory" if kind in _MEMORY_FILE_SYSTEMS else "local"
