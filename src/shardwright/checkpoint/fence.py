"""One generation of a run at a time may change its checkpoints: a later one shuts the earlier one out. No torch.

    root/generation        one line of JSON: the number of the newest generation and a token that is its alone

A generation that was thought dead (its machine was cut off, its processes were stopped) may come back while another has taken its
place. What it would then publish, or prune, belongs to a course that the run has left. So the first rank of every generation puts
its own token there before it trains, and looks for it before every change of a name: after another generation's claim nothing of
its own gets through, at whatever operation of a save it was. Between the look and the change lies one system call (one request, on
an object store): that long a save may still slip through, whole, under a name of its own.
"""

from __future__ import annotations

import errno
import json
import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shardwright.checkpoint.commit import GENERATION, make_root
from shardwright.checkpoint.disk import Disk, read_small, write_file
from shardwright.checkpoint.manifest import parse_json
from shardwright.checkpoint.place import Place
from shardwright.checkpoint.remote import disk_of
from shardwright.errors import CheckpointError

SHUT_OUT = "another generation has taken over this run"
"""Stands in the error of a save that came too late."""


@dataclass(frozen=True)
class Fence:
    """This generation's claim to a root of checkpoints."""

    root: Place
    number: int
    token: str

    def check(self) -> None:
        """See that nobody has claimed the root since.

        Raises:
            OSError: somebody has; or the claim cannot be read, and so is not to be trusted.
        """
        now = _read(self.root)
        if now is None or now[1] != self.token:
            what = "its claim is gone" if now is None else f"generation {now[0]}; this one is {self.number}"
            raise OSError(errno.ESTALE, f"{SHUT_OUT} ({what})")


def claim(root: Place) -> Fence:
    """Shut out whoever had the root; the first rank of a generation calls this before it trains.

    Raises:
        OSError: the root cannot be written.
    """
    disk = disk_of(root)
    make_root(root, disk)
    before = _read(root)
    fence = Fence(root, 1 if before is None else before[0] + 1, secrets.token_hex(16))
    text = (json.dumps({"generation": fence.number, "token": fence.token}) + "\n").encode()
    if not disk.renames:
        write_file(root / GENERATION, text, disk)
        return fence
    fresh = root / f"{GENERATION}.{fence.token}"
    try:
        write_file(fresh, text, disk)
        disk.rename(fresh, root / GENERATION)
    except OSError:
        with suppress(OSError):
            disk.remove(fresh)
        raise
    disk.sync_folder(root)
    return fence


def _read(root: Place) -> tuple[int, str] | None:
    if not (root / GENERATION).is_file():
        return None
    try:
        claimed = parse_json(read_small(root / GENERATION, 1000), root / GENERATION)
    except CheckpointError:
        return None
    if not isinstance(claimed, dict):
        return None
    number, token = claimed.get("generation"), claimed.get("token")
    return (number, token) if type(number) is int and 0 <= number < 2**62 and isinstance(token, str) else None


class FencedDisk(Disk):
    """A disk that changes no name once another generation has claimed the root."""

    def __init__(self, disk: Disk, fence: Fence) -> None:
        self._disk, self._fence = disk, fence
        self.renames = disk.renames

    def make_folder(self, path: Any) -> None:
        """See `Disk`, as for all that follow."""
        self._fence.check()
        self._disk.make_folder(path)

    def create(self, path: Any) -> int:
        """Checked: on an object store this is what replaces a pointer."""
        self._fence.check()
        return self._disk.create(path)

    def write(self, descriptor: int, data: memoryview) -> None:
        """Not checked: what is written has no name yet."""
        self._disk.write(descriptor, data)

    def bypass_cache(self, descriptor: int, bypass: bool) -> bool:
        """Not checked: it changes no byte."""
        return self._disk.bypass_cache(descriptor, bypass)

    def sync(self, descriptor: int) -> None:
        """Checked: on an object store this is when an object comes to be."""
        self._fence.check()
        self._disk.sync(descriptor)

    def close(self, descriptor: int) -> None:
        """Not checked: nothing is left open."""
        self._disk.close(descriptor)

    def sync_folder(self, path: Any) -> None:
        """Not checked: names are as they are."""
        self._disk.sync_folder(path)

    def rename(self, source: Any, target: Any) -> None:
        """Checked: this publishes."""
        self._fence.check()
        self._disk.rename(source, target)

    def remove(self, path: Any) -> None:
        """Checked."""
        self._fence.check()
        self._disk.remove(path)

    def remove_folder(self, path: Any) -> None:
        """Checked."""
        self._fence.check()
        self._disk.remove_folder(path)

    def remove_tree(self, path: Any) -> None:
        """Checked."""
        self._fence.check()
        self._disk.remove_tree(path)
