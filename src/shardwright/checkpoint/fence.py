"""Fencing: only the newest generation of a run may change its checkpoints. No torch.

    root/generation        one line of JSON: number and unique token of the newest generation

A generation that seemed dead (disconnected machine, stopped processes) may continue after
another has replaced it. Its checkpoints and removals would then be those of an abandoned run.
So the first rank of every generation writes a token before training and checks it before every
change of a name. Once a newer generation has written its token, every such operation of the
older one fails. Between check and change lies one system call (one request on an object store);
in this interval a save may still succeed, complete and under its own name.
"""

from __future__ import annotations

import errno
import json
import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shardwright.checkpoint.commit import GENERATION_NAME, create_root
from shardwright.checkpoint.disk import Disk, read_small_file, write_file
from shardwright.checkpoint.manifest import parse_json
from shardwright.checkpoint.object_store import get_disk
from shardwright.checkpoint.storage_path import StoragePath
from shardwright.errors import CheckpointError

SUPERSEDED_MESSAGE = "another generation has taken over this run"
"""Text in the error of a save by a superseded generation."""


@dataclass(frozen=True)
class GenerationFence:
    """Exclusive right of this generation to change the checkpoints of a root."""

    root: StoragePath
    generation: int
    token: str

    def check(self) -> None:
        """Check that no other generation has claimed the root.

        Raises:
            OSError: another generation has, or the `generation` file cannot be read.
        """
        current = _read_generation(self.root)
        if current is None or current[1] != self.token:
            reason = (
                "no valid generation file"
                if current is None
                else f"generation {current[0]}; this one is {self.generation}"
            )
            raise OSError(errno.ESTALE, f"{SUPERSEDED_MESSAGE} ({reason})")


def acquire_fence(root: StoragePath) -> GenerationFence:
    """Claim the root for a new generation, superseding the previous one.

    The first rank calls this before training.

    Raises:
        OSError: the root cannot be written.
    """
    disk = get_disk(root)
    create_root(root, disk)
    previous = _read_generation(root)
    fence = GenerationFence(root, 1 if previous is None else previous[0] + 1, secrets.token_hex(16))
    text = (json.dumps({"generation": fence.generation, "token": fence.token}) + "\n").encode()
    if not disk.has_atomic_rename:
        write_file(root / GENERATION_NAME, text, disk)
        return fence
    temporary = root / f"{GENERATION_NAME}.{fence.token}"
    try:
        write_file(temporary, text, disk)
        disk.rename(temporary, root / GENERATION_NAME)
    except OSError:
        with suppress(OSError):
            disk.remove(temporary)
        raise
    disk.sync_folder(root)
    return fence


def _read_generation(root: StoragePath) -> tuple[int, str] | None:
    if not (root / GENERATION_NAME).is_file():
        return None
    try:
        content = parse_json(read_small_file(root / GENERATION_NAME, 1000), root / GENERATION_NAME)
    except CheckpointError:
        return None
    if not isinstance(content, dict):
        return None
    number = content.get("generation")
    token = content.get("token")
    return (
        (number, token)
        if type(number) is int and 0 <= number < 2**62 and isinstance(token, str)
        else None
    )


class FencedDisk(Disk):
    """`Disk` that rejects changes of names once another generation has claimed the root."""

    def __init__(self, disk: Disk, fence: GenerationFence) -> None:
        self._disk = disk
        self._fence = fence
        self.has_atomic_rename = disk.has_atomic_rename

    def make_folder(self, path: Any) -> None:
        """Check the fence and create a folder."""
        self._fence.check()
        self._disk.make_folder(path)

    def create(self, path: Any) -> int:
        """Check the fence and create a file; on an object store this replaces a pointer."""
        self._fence.check()
        return self._disk.create(path)

    def write(self, descriptor: int, data: memoryview) -> None:
        """Write without checking the generation, because the file is not published yet."""
        self._disk.write(descriptor, data)

    def bypass_cache(self, descriptor: int, should_bypass: bool) -> bool:
        """Turn O_DIRECT on or off without a check: no data changes."""
        return self._disk.bypass_cache(descriptor, should_bypass)

    def sync(self, descriptor: int) -> None:
        """Check the fence and sync a file; on an object store this creates the object."""
        self._fence.check()
        self._disk.sync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close without a check, so that no file remains open."""
        self._disk.close(descriptor)

    def sync_folder(self, path: Any) -> None:
        """Sync a folder without a check: no name changes."""
        self._disk.sync_folder(path)

    def rename(self, source: Any, target: Any) -> None:
        """Check the fence and rename; this publishes checkpoints and pointers."""
        self._fence.check()
        self._disk.rename(source, target)

    def remove(self, path: Any) -> None:
        """Check the fence and remove a file."""
        self._fence.check()
        self._disk.remove(path)

    def remove_folder(self, path: Any) -> None:
        """Check the fence and remove a folder."""
        self._fence.check()
        self._disk.remove_folder(path)

    def remove_tree(self, path: Any) -> None:
        """Check the fence and remove a folder with its contents."""
        self._fence.check()
        self._disk.remove_tree(path)
