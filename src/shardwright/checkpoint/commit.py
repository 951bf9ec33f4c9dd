"""Commit protocol of checkpoints, in which a partial checkpoint is never visible. No torch.

    root/.saving-<token>/      all files are written here and synced to the device
        manifest.json          written last
    root/step-00000100         the folder after its rename, which makes the checkpoint visible
    root/latest                file that names the checkpoint to resume from, replaced by rename
    root/best                  file that names the best checkpoint, likewise
    root/generation            generation of the run that may write here: see `checkpoint.fence`

On object stores, which cannot rename, files are written under the checkpoint's final name, and
the checkpoint exists as soon as its manifest does; a folder without a manifest is an unfinished
save.

A step that is saved again (after a fallback to an older checkpoint) becomes step-00000100.1;
the older attempt is removed only after `latest` has moved, so that there always is a
checkpoint. Each save removes the remains of interrupted ones: a root belongs to one run, which
saves one checkpoint at a time, so any `.saving-` folder found by a save was interrupted. If a
process of an earlier generation is still writing there, its save fails without any damage.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.checkpoint.disk import Disk, read_small_file, write_file
from shardwright.checkpoint.manifest import MANIFEST_HASH_NAME, MANIFEST_NAME, Manifest
from shardwright.checkpoint.object_store import get_disk
from shardwright.checkpoint.storage_path import StoragePath
from shardwright.errors import CheckpointError
from shardwright.store_requests import describe_store_error

logger = logging.getLogger(__name__)

LATEST_NAME = "latest"
BEST_NAME = "best"
GENERATION_NAME = "generation"
"""File that names the generation allowed to write: see `checkpoint.fence`."""
_STEP_NAME_PATTERN = re.compile(r"step-(\d{8,15})(?:\.([1-9]\d{0,5}))?")
_SAVING_PREFIX = ".saving-"
_REMOVING_PREFIX = ".removing-"
_POINTER_PREFIX = ".pointer-"


@dataclass(frozen=True, order=True)
class StepFolder:
    """Folder `step-00000100`, or `step-00000100.1` if the step was saved again."""

    step: int
    attempt: int
    path: StoragePath

    @classmethod
    def parse(cls, path: StoragePath) -> StepFolder | None:
        """Parse a path's name; None for other names."""
        match = _STEP_NAME_PATTERN.fullmatch(path.name)
        return cls(int(match[1]), int(match[2] or 0), path) if match else None


def list_step_folders(root: StoragePath) -> list[StepFolder]:
    """Return the folders named like checkpoints, oldest step first, without links.

    If folders cannot be renamed, one without a manifest is an unfinished save and is left out
    too. Listings of object stores may lag behind writes and removals: a folder that a pointer names
    need not be listed, and a listed one counts only if its manifest can be found.
    """
    if not get_disk(root).has_atomic_rename:
        return _list_folders_with_manifest(root)
    if not root.is_dir():
        return []
    candidates = (
        StepFolder.parse(path) for path in root.iterdir() if path.is_dir() and not path.is_symlink()
    )
    return sorted(folder for folder in candidates if folder)


def _list_folders_with_manifest(root: Any) -> list[StepFolder]:
    listed = (root / name for name, size in root.list_sizes().items() if size is None)
    candidates = {folder for folder in map(StepFolder.parse, listed) if folder}
    candidates |= {
        target
        for target in (read_pointer(root, LATEST_NAME), read_pointer(root, BEST_NAME))
        if target is not None
    }
    return sorted(folder for folder in candidates if (folder.path / MANIFEST_NAME).is_file())


def has_saved(root: StoragePath) -> bool:
    """Return True if any save has finished here, even if its checkpoint was damaged later.

    Interrupted saves do not count.
    """
    if not get_disk(root).has_atomic_rename:
        return bool(list_step_folders(root))
    if not root.is_dir():
        return False
    return any(
        not path.name.startswith(
            (_SAVING_PREFIX, _REMOVING_PREFIX, _POINTER_PREFIX, GENERATION_NAME)
        )
        for path in root.iterdir()
    )


def check_store(root: StoragePath) -> None:
    """Check that an object store can be written to, by an object that is removed again.

    A store's permissions and address are otherwise tried by the first save, hours later. Does
    nothing for folders.

    Raises:
        CheckpointError: the store refuses or does not answer; contains its reason.
    """
    if isinstance(root, Path):
        return
    disk = get_disk(root)
    # A save removes what is left of it if the process dies here.
    path = root / f"{_POINTER_PREFIX}check-{secrets.token_hex(8)}"
    try:
        create_root(root, disk)
        write_file(path, b"shardwright\n", disk)
        disk.remove(path)
    except Exception as error:  # every file system has its own exceptions
        raise CheckpointError(
            f"checkpoints cannot be written here: {describe_store_error(error)}",
            field="checkpoint.dir",
            got=str(root),
            remedy="Check the bucket's name, the credentials and their permission to write",
        ) from error


def read_pointer(root: StoragePath, pointer: str) -> StepFolder | None:
    """Return the folder that a pointer names, existing or not; None if it is invalid."""
    if isinstance(root, Path) and not (root / pointer).is_file():
        return None
    try:  # an object is looked up when it is opened
        name = read_small_file(root / pointer, 100).decode("utf-8", errors="replace").strip()
    except CheckpointError:
        return None
    if not _STEP_NAME_PATTERN.fullmatch(name) or (root / name).is_symlink():
        return None
    return StepFolder.parse(root / name)


def list_step_folders_by_trust(root: StoragePath) -> list[StepFolder]:
    """Return folders in the order to try; see `sort_by_trust`."""
    return sort_by_trust(list_step_folders(root), read_pointer(root, LATEST_NAME))


def sort_by_trust(folders: Sequence[StepFolder], latest: StepFolder | None) -> list[StepFolder]:
    """Sort folders in the order to try: `latest`, older ones (newest first), later ones.

    Folders later than `latest` come from saves interrupted before their last operation, or were
    abandoned by a rollback.
    """
    folders = sorted(folders, reverse=True)
    if latest is None:
        return folders
    return [f for f in folders if f <= latest] + [f for f in folders if f > latest]


def create_root(root: StoragePath, disk: Disk) -> None:
    """Create the root and its missing parent folders."""
    if not isinstance(root, Path):
        disk.make_folder(root)
        return
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    for folder in reversed(missing):
        disk.make_folder(folder)
        disk.sync_folder(folder.parent)


def create_saving_folder(root: StoragePath, step: int, disk: Disk) -> StoragePath:
    """Remove the remains of interrupted saves and create the folder of the next save."""
    create_root(root, disk)
    remove_leftovers(root, disk)
    folder = root / (
        f"{_SAVING_PREFIX}{secrets.token_hex(8)}"
        if disk.has_atomic_rename
        else _choose_folder_name(root, step)
    )
    disk.make_folder(folder)
    return folder


def _choose_folder_name(root: StoragePath, step: int) -> str:
    """Return the name for the next attempt to save a step."""
    attempts = [folder.attempt for folder in list_step_folders(root) if folder.step == step]
    attempt = max(attempts) + 1 if attempts else 0
    while True:
        name = f"step-{step:08d}" + (f".{attempt}" if attempt else "")
        # A lagging listing may hide a finished attempt, which must not be overwritten.
        if isinstance(root, Path) or not (root / name / MANIFEST_NAME).is_file():
            return name
        attempt += 1


def remove_leftovers(root: StoragePath, disk: Disk) -> None:
    """Remove the remains of interrupted saves and removals."""
    finished = (
        [] if disk.has_atomic_rename else [folder.path.name for folder in list_step_folders(root)]
    )
    paths: list[StoragePath] = sorted(root.iterdir(), key=str)
    for path in paths:
        is_unfinished = (
            not disk.has_atomic_rename
            and StepFolder.parse(path) is not None
            and path.name not in finished
        )
        if (
            path.name.startswith((_SAVING_PREFIX, _REMOVING_PREFIX, _POINTER_PREFIX))
            or is_unfinished
        ):
            logger.warning("removing %s, left by an interrupted save", path)
            remove_path(path, disk)


def remove_path(path: StoragePath, disk: Disk) -> None:
    """Remove a file, link or folder."""
    if path.is_dir() and not path.is_symlink():
        disk.remove_tree(path)
    else:
        disk.remove(path)


def publish(
    root: StoragePath,
    folder: StoragePath,
    manifest: Manifest,
    *,
    is_best: bool = False,
    disk: Disk | None = None,
) -> StoragePath:
    """Turn a folder whose files are written and synced into a checkpoint; return its path.

    Raises:
        OSError: nothing was published; or, if moving a pointer failed, only the pointer is out
            of date.
    """
    disk = disk or get_disk(root)
    # The hash is written before the manifest, so that a folder with a manifest is complete.
    text = manifest.to_json()
    digest = hashlib.sha256(text).hexdigest()
    write_file(folder / MANIFEST_HASH_NAME, f"{digest}  {MANIFEST_NAME}\n".encode(), disk)
    write_file(folder / MANIFEST_NAME, text, disk)
    disk.sync_folder(folder)
    target = root / _choose_folder_name(root, manifest.step) if disk.has_atomic_rename else folder
    if disk.has_atomic_rename:
        disk.rename(folder, target)
        disk.sync_folder(root)
    for pointer in (LATEST_NAME, BEST_NAME) if is_best else (LATEST_NAME,):
        move_pointer(root, pointer, target.name, disk)
    return target


def move_pointer(root: StoragePath, pointer: str, name: str, disk: Disk) -> None:
    """Let `latest` or `best` name another folder, atomically."""
    if not disk.has_atomic_rename:  # stores replace an object atomically
        write_file(root / pointer, f"{name}\n".encode(), disk)
        return
    temporary = root / f"{_POINTER_PREFIX}{pointer}"
    disk.remove(temporary)
    write_file(temporary, f"{name}\n".encode(), disk)
    disk.rename(temporary, root / pointer)
    disk.sync_folder(root)


@dataclass(frozen=True)
class RetentionPolicy:
    """Retention rule: keep the `num_last` newest checkpoints and steps divisible by `every_steps`.

    The checkpoints that `latest` and `best` name are always kept.
    """

    num_last: int
    every_steps: int | None = None

    def __post_init__(self) -> None:
        for name, number in (("last", self.num_last), ("every", self.every_steps)):
            if number is not None and number < 1:
                raise CheckpointError(
                    "must be at least 1", field=f"checkpoint.keep_{name}", got=number
                )


def prune_checkpoints(
    root: StoragePath, retention: RetentionPolicy, disk: Disk | None = None
) -> list[StoragePath]:
    """Remove the checkpoints that `retention` does not retain; return the removed paths.

    Only the last attempt of a step counts. Checkpoints later than `latest` were abandoned by a
    rollback and are removed too.
    """
    latest = read_pointer(root, LATEST_NAME)
    folders = list_step_folders(root)
    current = {
        f.step: f for f in folders if latest is None or f <= latest
    }  # ascending: the last attempt of a step wins
    retained = {f.path for f in list(current.values())[-retention.num_last :]}
    retained |= {
        f.path
        for step, f in current.items()
        if retention.every_steps and step % retention.every_steps == 0
    }
    retained |= {
        target.path for target in (latest, read_pointer(root, BEST_NAME)) if target is not None
    }
    return remove_checkpoints(root, (f.path for f in folders if f.path not in retained), disk)


def remove_checkpoints(
    root: StoragePath, paths: Iterable[StoragePath], disk: Disk | None = None
) -> list[StoragePath]:
    """Remove checkpoint folders, each renamed first, so that no partial one stays visible."""
    disk = disk or get_disk(root)
    removed = []
    for path in paths:
        doomed = root / f"{_REMOVING_PREFIX}{path.name}" if disk.has_atomic_rename else path
        if disk.has_atomic_rename:
            disk.rename(path, doomed)
        disk.remove_tree(doomed)
        removed.append(path)
    if removed:
        disk.sync_folder(root)
    return removed
