"""How a save becomes a checkpoint: the order of operations that makes a half-written one impossible to take. No torch.

    root/.saving-<token>/      everything is written here, each file brought to the device
        manifest.json          last
    root/step-00000100         the folder is renamed: it is whole from the instant it has this name
    root/latest                a file that names the folder, replaced by rename: from here on it is the one to resume from
    root/best                  the same for the best one
    root/generation            which start of the run may write here: see `checkpoint.fence`

Where nothing can be renamed (object stores) the files are written under the checkpoint's own name, and it is whole from the instant
its manifest is there; a folder without one is a save that did not end.

A step that is saved again (after a fallback to an older checkpoint) becomes step-00000100.1; the older attempt goes only after
`latest` has moved, so that there is a checkpoint at every instant. What a dead save left, the next one removes: a root belongs
to one run, which saves one checkpoint at a time, so every `.saving-` folder that a save finds is dead. If a process of an
earlier generation is writing there after all, its save fails and harms nothing.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shardwright.checkpoint.disk import Disk, read_small, write_file
from shardwright.checkpoint.manifest import MANIFEST_HASH_NAME, MANIFEST_NAME, Manifest
from shardwright.checkpoint.place import Place
from shardwright.checkpoint.remote import disk_of
from shardwright.errors import CheckpointError

logger = logging.getLogger(__name__)

LATEST = "latest"
BEST = "best"
GENERATION = "generation"
"""Whose turn it is to write here: see `checkpoint.fence`."""
_STEP_NAME = re.compile(r"step-(\d{8,15})(?:\.([1-9]\d{0,5}))?")
_SAVING, _REMOVING, _POINTER = ".saving-", ".removing-", ".pointer-"


@dataclass(frozen=True, order=True)
class StepFolder:
    """A folder of a root, by its name: `step-00000100`, or `step-00000100.1` where the step was saved again."""

    step: int
    attempt: int
    path: Place

    @classmethod
    def of(cls, path: Place) -> StepFolder | None:
        """By a path's name; None for other names."""
        match = _STEP_NAME.fullmatch(path.name)
        return cls(int(match[1]), int(match[2] or 0), path) if match else None


def step_folders(root: Place) -> list[StepFolder]:
    """Folders of a root that have a checkpoint's name, oldest step first; links are left out.

    Where folders cannot be renamed, one without a manifest is a save that has not ended: it is left out, too.
    """
    if not root.is_dir():
        return []
    found = (StepFolder.of(path) for path in root.iterdir() if path.is_dir() and not path.is_symlink())
    renames = disk_of(root).renames
    return sorted(folder for folder in found if folder and (renames or (folder.path / MANIFEST_NAME).is_file()))


def has_saved(root: Place) -> bool:
    """Whether any save has ended here, whole or damaged since; what dead saves left does not count."""
    if not root.is_dir():
        return False
    if not disk_of(root).renames:
        return bool(step_folders(root))
    return any(not path.name.startswith((_SAVING, _REMOVING, _POINTER, GENERATION)) for path in root.iterdir())


def read_pointer(root: Place, pointer: str) -> StepFolder | None:
    """The folder that `latest` or `best` names, whether it is there or not; None without a pointer, or with a wrong one."""
    if not (root / pointer).is_file():
        return None
    try:
        name = read_small(root / pointer, 100).decode("utf-8", errors="replace").strip()
    except CheckpointError:
        return None
    if not _STEP_NAME.fullmatch(name) or (root / name).is_symlink():
        return None
    return StepFolder.of(root / name)


def in_order_of_trust(root: Place) -> list[StepFolder]:
    """Folders in the order in which to try them: what `latest` names, then the newest before it, then any beyond it.

    Beyond `latest` lie only saves that died before their last step, and those of a course that was given up by going back.
    """
    folders = step_folders(root)[::-1]
    latest = read_pointer(root, LATEST)
    if latest is None:
        return folders
    return [f for f in folders if f <= latest] + [f for f in folders if f > latest]


def make_root(root: Place, disk: Disk) -> None:
    """Make the root and the folders above it where they are missing."""
    if not isinstance(root, Path):
        disk.make_folder(root)
        return
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    for folder in reversed(missing):
        disk.make_folder(folder)
        disk.sync_folder(folder.parent)


def begin(root: Place, step: int, disk: Disk) -> Place:
    """Remove what dead saves left and make the folder that the next one is written into."""
    make_root(root, disk)
    remove_leftovers(root, disk)
    folder = root / (f"{_SAVING}{secrets.token_hex(8)}" if disk.renames else _free_name(root, step))
    disk.make_folder(folder)
    return folder


def _free_name(root: Place, step: int) -> str:
    """The name of the next attempt to save a step."""
    attempts = [found.attempt for found in step_folders(root) if found.step == step]
    return f"step-{step:08d}" + (f".{max(attempts) + 1}" if attempts else "")


def remove_leftovers(root: Place, disk: Disk) -> None:
    """Remove what dead saves and prunings left."""
    whole = [] if disk.renames else [folder.path.name for folder in step_folders(root)]
    inside: list[Place] = sorted(root.iterdir(), key=str)
    for path in inside:
        dead_step = not disk.renames and StepFolder.of(path) is not None and path.name not in whole
        if path.name.startswith((_SAVING, _REMOVING, _POINTER)) or dead_step:
            logger.warning("removing %s, left behind by a save that did not end", path)
            discard(path, disk)


def discard(path: Place, disk: Disk) -> None:
    """Remove a file or folder."""
    if path.is_dir() and not path.is_symlink():
        disk.remove_tree(path)
    else:
        disk.remove(path)


def publish(root: Place, folder: Place, manifest: Manifest, *, best: bool = False, disk: Disk | None = None) -> Place:
    """Turn a folder whose files are all written and brought to the device into a checkpoint; returns its path.

    Raises:
        OSError: nothing was published, unless the message of `move_pointer` says that only a pointer is behind.
    """
    disk = disk or disk_of(root)
    # The hash goes before the manifest, so that a folder with a manifest has all it needs.
    text = manifest.to_json()
    digest = hashlib.sha256(text).hexdigest()
    write_file(folder / MANIFEST_HASH_NAME, f"{digest}  {MANIFEST_NAME}\n".encode(), disk)
    write_file(folder / MANIFEST_NAME, text, disk)
    disk.sync_folder(folder)
    target = root / _free_name(root, manifest.step) if disk.renames else folder
    if disk.renames:
        disk.rename(folder, target)
        disk.sync_folder(root)
    for pointer in (LATEST, BEST) if best else (LATEST,):
        move_pointer(root, pointer, target.name, disk)
    return target


def move_pointer(root: Place, pointer: str, name: str, disk: Disk) -> None:
    """Let `latest` or `best` name another folder, in one instant."""
    if not disk.renames:  # an object is replaced whole
        write_file(root / pointer, f"{name}\n".encode(), disk)
        return
    fresh = root / f"{_POINTER}{pointer}"
    disk.remove(fresh)
    write_file(fresh, f"{name}\n".encode(), disk)
    disk.rename(fresh, root / pointer)
    disk.sync_folder(root)


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay beside those that `latest` and `best` name: the newest `last`, and steps that `every` divides."""

    last: int
    every: int | None = None

    def __post_init__(self) -> None:
        for name, number in (("last", self.last), ("every", self.every)):
            if number is not None and number < 1:
                raise CheckpointError("must be at least 1", field=f"checkpoint.keep_{name}", got=number)


def prune(root: Place, keep: Keep, disk: Disk | None = None) -> list[Place]:
    """Remove the checkpoints that `keep` does not name; returns what was removed.

    Of a step saved twice only the last attempt counts. Checkpoints beyond `latest` belong to a course that the run has left
    by going back; they go too.
    """
    latest = read_pointer(root, LATEST)
    folders = step_folders(root)
    current = {f.step: f for f in folders if latest is None or f <= latest}  # ascending: the last attempt of a step wins
    kept = {f.path for f in list(current.values())[-keep.last :]}
    kept |= {f.path for step, f in current.items() if keep.every and step % keep.every == 0}
    kept |= {pointed.path for pointed in (latest, read_pointer(root, BEST)) if pointed is not None}
    return remove_checkpoints(root, (f.path for f in folders if f.path not in kept), disk)


def remove_checkpoints(root: Place, paths: Iterable[Place], disk: Disk | None = None) -> list[Place]:
    """Remove checkpoint folders; each loses its name in one instant, so that no half-removed one can be taken."""
    removed, disk = [], disk or disk_of(root)
    for path in paths:
        going = root / f"{_REMOVING}{path.name}" if disk.renames else path
        if disk.renames:
            disk.rename(path, going)
        disk.remove_tree(going)
        removed.append(path)
    if removed:
        disk.sync_folder(root)
    return removed
