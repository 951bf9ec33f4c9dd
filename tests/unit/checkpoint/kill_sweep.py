"""Kill sweep: a save is killed, or loses power, before each of its operations on disk; a whole
checkpoint must remain.

Run as a program: it imports torch once and forks a process per kill. Prints the number of
operations of a save as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwright.checkpoint.commit import RetentionPolicy
from shardwright.checkpoint.disk import Disk
from shardwright.checkpoint.tensor_loading import find_newest_checkpoint, load_checkpoint
from shardwright.checkpoint.tensor_saving import save_checkpoint

OLD = 20
NEW = 30
SCRATCH = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""In memory if possible: only the order of operations matters, and fsync takes milliseconds."""


class CountingDisk(Disk):
    """Calls `before(operation, paths)` ahead of every operation."""

    def __init__(self) -> None:
        self.count = 0
        self.paths: dict[int, Path] = {}

    def before(self, operation: str, *paths: Path) -> None:
        self.count += 1

    def make_folder(self, path: Path) -> None:
        self.before("make_folder", path)
        super().make_folder(path)

    def create(self, path: Path) -> int:
        self.before("create", path)
        descriptor = super().create(path)
        self.paths[descriptor] = path
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> None:
        self.before("write", self.paths[descriptor])
        super().write(descriptor, data[: len(data) // 2])
        self.before("write", self.paths[descriptor])  # between two halves of a write
        super().write(descriptor, data[len(data) // 2 :])

    def sync(self, descriptor: int) -> None:
        self.before("sync", self.paths[descriptor])
        super().sync(descriptor)

    def close(self, descriptor: int) -> None:
        self.before("close", self.paths[descriptor])
        super().close(descriptor)

    def sync_folder(self, path: Path) -> None:
        self.before("sync_folder", path)
        super().sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self.before("rename", source, target)
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self.before("remove", path)
        super().remove(path)

    def remove_folder(self, path: Path) -> None:
        self.before("remove_folder", path)
        super().remove_folder(path)


class KillingDisk(CountingDisk):
    """Kills the process before the n-th operation."""

    def __init__(self, kill_at: int) -> None:
        super().__init__()
        self.kill_at = kill_at

    def before(self, operation: str, *paths: Path) -> None:
        super().before(operation, *paths)
        if self.count == self.kill_at:
            self.lose_data()
            os.kill(os.getpid(), signal.SIGKILL)

    def lose_data(self) -> None:
        """Lose further data at the kill; nothing here."""


@dataclass
class UnsyncedName:
    """Directory entry that is not yet synced: created, or renamed from `source` over a file with
    the content `replaced`.
    """

    path: Path
    source: Path | None = None
    replaced: bytes | None = None

    def forget(self) -> None:
        if self.source is not None and self.path.exists():
            os.replace(self.path, self.source)
            if self.replaced is not None:
                self.path.write_bytes(self.replaced)
        elif self.path.is_dir():
            shutil.rmtree(self.path)
        else:
            self.path.unlink(missing_ok=True)


class PowerLossDisk(KillingDisk):
    """Kills the process like a power failure: unsynced bytes are lost, and with `lose_names` so are
    all names created or renamed since their folder was synced."""

    def __init__(self, kill_at: int, lose_names: bool) -> None:
        super().__init__(kill_at)
        self.lose_names = lose_names
        self.unsynced: set[Path] = set()
        self.names: list[UnsyncedName] = []

    def before(self, operation: str, *paths: Path) -> None:
        super().before(operation, *paths)
        path = paths[-1]
        if operation in ("create", "write"):
            self.unsynced.add(path)
        if operation == "sync":
            self.unsynced.discard(path)
        if operation in ("create", "make_folder"):
            self.names.append(UnsyncedName(path))
        if operation == "sync_folder":
            self.names = [name for name in self.names if name.path.parent != path]
        if operation == "rename":
            source = paths[0]
            self.unsynced = {rename_path(p, source, path) for p in self.unsynced}
            for name in self.names:
                name.path = rename_path(name.path, source, path)
            self.names.append(
                UnsyncedName(path, source, path.read_bytes() if path.is_file() else None)
            )

    def lose_data(self) -> None:
        for path in self.unsynced:
            if path.exists():
                os.truncate(path, path.stat().st_size // 3)
        if self.lose_names:
            while self.names:
                last = self.names.pop()
                last.forget()
                for name in self.names if last.source is not None else ():
                    name.path = rename_path(name.path, last.path, last.source)


def rename_path(path: Path, source: Path, target: Path) -> Path:
    """Return a path after `source` was renamed to `target`."""
    return target / path.relative_to(source) if path.is_relative_to(source) else path


def make_tensors(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((40, 30), float(step)), "b": torch.arange(7) + step}


def prepare(root: Path, *, damaged: bool) -> None:
    """Save two old checkpoints, and with `damaged` also a damaged one of the next step."""
    save_checkpoint(root, 10, make_tensors(10), {"step": 10}, is_best=True)
    save_checkpoint(root, OLD, make_tensors(OLD), {"step": OLD})
    if damaged:
        broken = (
            save_checkpoint(root, NEW, make_tensors(NEW), {"step": NEW}).path
            / "shard-00000.safetensors"
        )
        data = bytearray(broken.read_bytes())
        data[-1] ^= 1
        broken.write_bytes(data)


def save_new(root: Path, disk: Disk) -> None:
    save_checkpoint(
        root,
        NEW,
        make_tensors(NEW),
        {"step": NEW},
        retention=RetentionPolicy(1),
        is_best=True,
        disk=disk,
    )


def check_root(root: Path) -> int:
    """Check that the newest checkpoint is the old or the new one, bit-equal, and that another save
    works and leaves no files behind. Return the newest step.
    """
    newest = find_newest_checkpoint(root)
    assert newest is not None, "no checkpoint left"
    assert newest.step in (OLD, NEW), newest
    tensors = {name: torch.zeros_like(tensor) for name, tensor in make_tensors(0).items()}
    assert load_checkpoint(newest, tensors) == {"step": newest.step}
    assert all(
        torch.equal(tensors[name], tensor) for name, tensor in make_tensors(newest.step).items()
    )
    save_checkpoint(root, NEW + 10, make_tensors(NEW + 10), {}, retention=RetentionPolicy(1))
    remaining = sorted(path.name for path in root.iterdir())
    best = (root / "best").read_text().strip()
    assert remaining == sorted({"best", "latest", "step-00000040", best}), remaining
    return newest.step


def sweep(make_disk: Callable[[int], CountingDisk], *, damaged: bool) -> dict[str, int]:
    """Kill a save before every operation; count how often the old and the new checkpoint remain."""
    counting = CountingDisk()
    counts = {OLD: 0, NEW: 0}
    with tempfile.TemporaryDirectory(dir=SCRATCH) as base:
        prepared = Path(base) / "prepared"
        prepare(prepared, damaged=damaged)
        shutil.copytree(prepared, Path(base) / "counted")
        save_new(Path(base) / "counted", counting)
        for kill_at in range(1, counting.count + 1):
            root = Path(base) / "root"
            shutil.copytree(prepared, root)
            child = os.fork()
            if child == 0:
                save_new(root, make_disk(kill_at))
                os._exit(0)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), f"the save survived operation {kill_at}"
            try:
                counts[check_root(root)] += 1
            except Exception as error:
                raise AssertionError(
                    f"killed before operation {kill_at} of {counting.count}"
                ) from error
            shutil.rmtree(root)
    return {"operations": counting.count, "old": counts[OLD], "new": counts[NEW]}


def main() -> None:
    torch.set_num_threads(1)
    result = {
        f"kill damaged={damaged}": sweep(KillingDisk, damaged=damaged) for damaged in (False, True)
    }
    result["power"] = sweep(lambda kill_at: PowerLossDisk(kill_at, lose_names=False), damaged=False)
    result["power lose_names"] = sweep(
        lambda kill_at: PowerLossDisk(kill_at, lose_names=True), damaged=False
    )
    result["power lose_names damaged"] = sweep(
        lambda kill_at: PowerLossDisk(kill_at, lose_names=True), damaged=True
    )
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
