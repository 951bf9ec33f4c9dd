"""Saving of checkpoints: ranks write their own shards, each box once, without gathering."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwright.checkpoint import commit
from shardwright.checkpoint.commit import RetentionPolicy
from shardwright.checkpoint.direct_io import create_hashed_file
from shardwright.checkpoint.disk import Disk, write_file
from shardwright.checkpoint.header import build_header
from shardwright.checkpoint.local_tensors import ParameterShard, iterate_blocks
from shardwright.checkpoint.manifest import (
    VALUES_NAME,
    Manifest,
    StoredFile,
    encode_values,
    name_shard_file,
)
from shardwright.checkpoint.object_store import get_disk
from shardwright.checkpoint.rank_group import RankGroup
from shardwright.checkpoint.save_plan import (
    SavePlan,
    describe_error,
    plan_save,
    require_no_faults,
)
from shardwright.checkpoint.storage_path import StoragePath, parse_storage_path
from shardwright.errors import SaveFailed, ShardwrightError
from shardwright.version import __version__

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedCheckpoint:
    """Result of a save: bytes over all ranks, seconds on this rank, removed checkpoints."""

    path: StoragePath
    step: int
    num_bytes: int
    seconds: float
    removed: tuple[StoragePath, ...] = ()


def save_checkpoint(
    root: str | StoragePath,
    step: int,
    tensors: Mapping[str, torch.Tensor | ParameterShard],
    values: Mapping[str, Any],
    *,
    merged_values: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    retention: RetentionPolicy | None = None,
    is_best: bool = False,
    disk: Disk | None = None,
) -> SavedCheckpoint:
    """Write a checkpoint to `root/step-<step>`.

    Collective over `group`: either every rank returns or every rank raises.

    Args:
        root: folder or fsspec URL of one run's checkpoints, the same for all ranks (shared
            between machines).
        step: number of finished optimizer steps.
        tensors: tensors by name. Plain tensors are replicated on all ranks that name them;
            DTensors know their sharding. Ranks may name different tensors (pipeline stages).
        values: all other state, as JSON; the first rank's is written.
        merged_values: further values that are distributed over ranks: objects are merged key by
            key, equal keys must have equal values.
        group: ranks that save together; None is the default group, or this process alone if
            there is none.
        retention: rule for older checkpoints; None removes none.
        is_best: let `root/best` name this checkpoint.
        disk: file operations; tests pass one that fails.

    Raises:
        SaveFailed: a rank could not write, or the ranks disagree about the tensors. Older
            checkpoints are intact, nothing is left behind, and the run may continue.
    """
    ranks = RankGroup(group)
    plan = plan_save(ranks, step, tensors, values, merged_values)
    return finish_save(
        ranks, parse_storage_path(root), plan, retention=retention, is_best=is_best, disk=disk
    )


def finish_save(
    ranks: RankGroup,
    root: StoragePath,
    plan: SavePlan,
    *,
    retention: RetentionPolicy | None,
    is_best: bool,
    disk: Disk | None,
) -> SavedCheckpoint:
    """Write and publish a planned save, then prune. See `save_checkpoint`."""
    start = time.monotonic()
    disk = disk or get_disk(root)
    folder: StoragePath | None = None
    try:
        values = {**plan.values, **merge_values(ranks, plan.merged_values)}
        folder = _create_folder(ranks, root, plan.step, disk)
        manifest = _write_files(ranks, plan, values, folder, disk)
        path, removed = _commit_folder(ranks, root, folder, manifest, retention, is_best, disk)
    except SaveFailed:
        if folder is not None and ranks.is_first:
            _discard_quietly(folder, disk)
        raise
    return SavedCheckpoint(
        path, plan.step, manifest.num_bytes, time.monotonic() - start, tuple(removed)
    )


def merge_values(ranks: RankGroup, local_values: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the objects of all ranks, which are sent in full only if they differ.

    Raises:
        SaveFailed: ranks disagree about a value.
    """
    digests = ranks.all_gather(
        hashlib.sha256(json.dumps(local_values, sort_keys=True).encode()).hexdigest()
    )
    if len(set(digests)) == 1:
        return dict(local_values)
    result: dict[str, Any] = {}
    for rank, values in enumerate(ranks.all_gather(local_values)):
        merge_into(result, values, rank, "values")
    return result


def merge_into(target: dict[str, Any], values: Mapping[str, Any], rank: int, location: str) -> None:
    """Merge a rank's object into `target`, key by key; `location` is its name in errors.

    Raises:
        SaveFailed: a value differs from that of an earlier rank.
    """
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(target.setdefault(key, {}), dict):
            merge_into(target[key], value, rank, f"{location}.{key}")
        elif target.setdefault(key, value) != value:
            raise SaveFailed(
                f"ranks disagree about {location}.{key}: "
                f"{target[key]!r:.80}, on rank {rank} {value!r:.80}"
            )


def _create_folder(ranks: RankGroup, root: StoragePath, step: int, disk: Disk) -> StoragePath:
    """Create the folder to write into, on the first rank, and return its path on all ranks."""
    result = {"folder": "", "fault": None}
    if ranks.is_first:
        try:
            result["folder"] = str(commit.create_saving_folder(root, step, disk).name)
        except (OSError, ShardwrightError) as error:
            result["fault"] = describe_error(error)
    result = ranks.broadcast_first(result)
    require_no_faults([result["fault"]], f"nothing was written to {root}")
    return root / str(result["folder"])


def _write_files(
    ranks: RankGroup, plan: SavePlan, values: Mapping[str, Any], folder: StoragePath, disk: Disk
) -> Manifest:
    """Write this rank's file, and values on the first rank; return the common manifest."""
    files: dict[str, list[Any]] = {}
    fault = plan.fault
    try:
        if plan.local_writes:
            files[name_shard_file(ranks.rank)] = _write_shard(
                folder / name_shard_file(ranks.rank), plan, disk
            )
        if ranks.is_first:
            text = encode_values(values)
            files[VALUES_NAME] = [len(text), write_file(folder / VALUES_NAME, text, disk)]
        disk.sync_folder(folder)
    except (OSError, RuntimeError, MemoryError, ShardwrightError) as error:
        fault = describe_error(error)
    reports = ranks.all_gather({"fault": fault, "files": files})
    require_no_faults(
        [report["fault"] for report in reports], f"older checkpoints in {folder.parent} are intact"
    )
    return Manifest(
        step=plan.step,
        world_size=ranks.world_size,
        files={
            name: StoredFile(*file) for report in reports for name, file in report["files"].items()
        },
        tensors=plan.entries,
        written_by=f"shardwright {__version__}, torch {torch.__version__}",
    )


def _write_shard(path: StoragePath, plan: SavePlan, disk: Disk) -> list[Any]:
    """Write this rank's file; return its size in bytes and SHA-256."""
    keys = {
        (name, part.box): part.key for name, entry in plan.entries.items() for part in entry.slices
    }
    header = build_header(
        [(keys[name, box], dtype, box.lengths) for name, dtype, box, _ in plan.local_writes]
    )
    size_bytes = len(header) + sum(values.nbytes for *_, values in plan.local_writes)
    with create_hashed_file(path, disk, size_bytes) as file:
        file.write(memoryview(header))
        for name, _, _, values in plan.local_writes:
            for block in iterate_blocks(values, is_offloaded=name in plan.offloaded_names):
                file.write(block)
        sha256 = file.finish()
        return [file.size_bytes, sha256]


def _commit_folder(
    ranks: RankGroup,
    root: StoragePath,
    folder: StoragePath,
    manifest: Manifest,
    retention: RetentionPolicy | None,
    is_best: bool,
    disk: Disk,
) -> tuple[StoragePath, list[StoragePath]]:
    """Publish and prune on the first rank; return checkpoint and removed paths on all."""
    result: dict[str, Any] = {"name": "", "removed": [], "fault": None}
    if ranks.is_first:
        try:
            result["name"] = commit.publish(root, folder, manifest, is_best=is_best, disk=disk).name
        except (OSError, ShardwrightError) as error:
            result["fault"] = describe_error(error)
        if result["fault"] is None and retention is not None:
            try:
                result["removed"] = [
                    path.name for path in commit.prune_checkpoints(root, retention, disk)
                ]
            except OSError as error:  # the save itself succeeded
                logger.warning("could not remove older checkpoints in %s: %s", root, error)
    result = ranks.broadcast_first(result)
    require_no_faults([result["fault"]], f"older checkpoints in {root} are intact")
    return root / result["name"], [root / name for name in result["removed"]]


def _discard_quietly(folder: StoragePath, disk: Disk) -> None:
    """Remove the files of a failed save; if that fails, the next save removes them."""
    try:
        if folder.exists():
            commit.remove_path(folder, disk)
    except OSError as error:
        logger.warning("could not remove %s: %s; the next save will try again", folder, error)
