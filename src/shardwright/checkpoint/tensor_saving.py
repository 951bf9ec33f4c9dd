"""Saving of checkpoints: ranks write their own shards, each box once, without gathering.

Every rank announces its boxes. A box on several ranks is written by the one with the fewest
bytes assigned so far. All ranks compute the same assignment from the same announcements. Why
not DCP's planners: docs/decisions/0020-checkpoint-format.md.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from shardwright import __version__
from shardwright.checkpoint import commit
from shardwright.checkpoint.boxes import Box, build_full_box, find_cover_fault
from shardwright.checkpoint.commit import RetentionPolicy
from shardwright.checkpoint.direct_io import create_hashed_file
from shardwright.checkpoint.disk import Disk, write_file
from shardwright.checkpoint.header import build_header
from shardwright.checkpoint.local_tensors import (
    LocalTensor,
    ParameterShard,
    describe_local_tensor,
    iterate_blocks,
)
from shardwright.checkpoint.manifest import (
    DTYPE_BYTES,
    VALUES_NAME,
    Manifest,
    StoredFile,
    StoredSlice,
    TensorEntry,
    encode_values,
)
from shardwright.checkpoint.object_store import get_disk
from shardwright.checkpoint.rank_group import RankGroup
from shardwright.checkpoint.storage_path import StoragePath, parse_storage_path
from shardwright.errors import SaveFailed, ShardwrightError

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


@dataclass(frozen=True)
class SavePlan:
    """Assignment of boxes to ranks, with this rank's share in the order of its file.

    `entries` and `writers` are the same on all ranks.
    """

    step: int
    values: Mapping[str, Any]
    merged_values: Mapping[str, Any]
    entries: dict[str, TensorEntry]
    writers: dict[tuple[str, Box], int]
    local_writes: list[tuple[str, str, Box, torch.Tensor]]
    digest: str
    """SHA-256 of this rank's announcement; if no rank's changes, the assignment is reused."""
    tensor_versions: tuple[int, ...] = ()
    """Version counters of the tensors of `local_writes`, which copying must not change."""
    fault: str | None = None
    """Reason why this rank cannot write; all ranks learn it before anything is published."""

    def copy_tensors(
        self, copy: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    ) -> SavePlan:
        """Return a plan that writes copies, so that the originals may change."""
        originals = [values for *_, values in self.local_writes]
        try:
            copies = copy(originals)
        except (RuntimeError, MemoryError) as error:
            return replace(
                self,
                local_writes=[],
                fault=f"not enough host memory for the copy: {_describe_error(error)}",
            )
        if _read_versions(originals) != self.tensor_versions:
            return replace(self, local_writes=[], fault="a tensor changed while it was copied")
        return replace(
            self,
            local_writes=[
                (*item[:3], values) for item, values in zip(self.local_writes, copies, strict=True)
            ],
        )


def plan_save(
    ranks: RankGroup,
    step: int,
    tensors: Mapping[str, torch.Tensor | ParameterShard],
    values: Mapping[str, Any],
    merged_values: Mapping[str, Any] | None = None,
    *,
    previous_plan: SavePlan | None = None,
) -> SavePlan:
    """Assign boxes to ranks; writes nothing yet. See `save_checkpoint`.

    `previous_plan` is the plan of an earlier save, reused if no rank's boxes have changed; then
    boxes are not exchanged again.
    """
    local_tensors, digest, is_unchanged = _announce_tensors(
        ranks, step, tensors, values, merged_values or {}, previous_plan
    )
    if is_unchanged:
        assert previous_plan is not None
        entries = previous_plan.entries
        takers = previous_plan.writers
    else:
        entries, takers = _assign_writers(_gather_boxes(ranks, local_tensors))
    writing = [
        (name, tensor.dtype, piece.box, piece.values)
        for name, tensor in local_tensors.items()
        for piece in tensor.slices
        if takers[name, piece.box] == ranks.rank
    ]
    # Wide elements first, so that every tensor starts at a multiple of its element size.
    writing.sort(key=lambda item: (-DTYPE_BYTES[item[1]], item[0], item[2]))
    return SavePlan(
        step,
        values,
        merged_values or {},
        entries,
        takers,
        writing,
        digest,
        tensor_versions=_read_versions([tensor for *_, tensor in writing]),
    )


def _read_versions(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return torch's counts of in-place changes; 0 for inference tensors, which have none."""
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)


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
        values = {**plan.values, **_merge_values(ranks, plan.merged_values)}
        folder = _create_folder(ranks, root, plan.step, disk)
        manifest = _write_files(ranks, plan, values, folder, disk)
        path, removed = _commit_folder(ranks, root, folder, manifest, retention, is_best, disk)
    except SaveFailed:
        if folder is not None and ranks.is_first and folder.exists():
            _discard_quietly(folder, disk)
        raise
    return SavedCheckpoint(
        path, plan.step, manifest.num_bytes, time.monotonic() - start, tuple(removed)
    )


RanksByBox = dict[str, tuple[str, tuple[int, ...], dict[Box, list[int]]]]
"""Dtype, shape and ranks by box of every tensor, by name, over all ranks."""


def _announce_tensors(
    ranks: RankGroup,
    step: int,
    tensors: Mapping[str, torch.Tensor | ParameterShard],
    values: Mapping[str, Any],
    merged_values: Mapping[str, Any],
    previous_plan: SavePlan | None,
) -> tuple[dict[str, LocalTensor], str, bool]:
    """Return this rank's tensors, their digest, and True if no rank's digest has changed.

    Invalid input of one rank is an error on all.
    """
    local_tensors: dict[str, LocalTensor] = {}
    fault = None
    try:
        local_tensors = {
            name: describe_local_tensor(name, tensor) for name, tensor in tensors.items()
        }
        encode_values({**values, **merged_values})
    except ShardwrightError as error:
        fault = str(error)
    digest = hashlib.sha256(json.dumps(_encode_local_tensors(local_tensors)).encode()).hexdigest()
    is_unchanged = previous_plan is not None and previous_plan.digest == digest
    reports = ranks.all_gather([step, fault, is_unchanged])
    _require_no_faults([report[1] for report in reports], "nothing was written")
    if len(steps := {report[0] for report in reports}) > 1:
        raise SaveFailed(f"ranks save different steps: {sorted(steps)}")
    return local_tensors, digest, all(report[2] for report in reports)


def _encode_local_tensors(local_tensors: Mapping[str, LocalTensor]) -> dict[str, Any]:
    return {
        name: [tensor.dtype, tensor.shape, [[p.box.offsets, p.box.lengths] for p in tensor.slices]]
        for name, tensor in local_tensors.items()
    }


def _gather_boxes(ranks: RankGroup, local_tensors: Mapping[str, LocalTensor]) -> RanksByBox:
    """Gather the boxes of all ranks and check that they cover every tensor exactly once."""
    entries: RanksByBox = {}
    for rank, rank_tensors in enumerate(ranks.all_gather(_encode_local_tensors(local_tensors))):
        for name, (dtype, shape, boxes) in rank_tensors.items():
            entry = entries.setdefault(name, (dtype, tuple(shape), {}))
            if entry[:2] != (dtype, tuple(shape)):
                raise SaveFailed(
                    f"ranks disagree about {name}: {entry[0]} "
                    f"{entry[1]}, on rank {rank} {dtype} {tuple(shape)}"
                )
            for offsets, lengths in boxes:
                entry[2].setdefault(Box(tuple(offsets), tuple(lengths)), []).append(rank)
    for name, (_, shape, holders) in entries.items():
        if fault := find_cover_fault(shape, list(holders)):
            raise SaveFailed(f"the ranks together do not hold {name} exactly once: {fault}")
    return entries


def _merge_values(ranks: RankGroup, local_values: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the objects of all ranks, which are sent in full only if they differ."""
    digests = ranks.all_gather(
        hashlib.sha256(json.dumps(local_values, sort_keys=True).encode()).hexdigest()
    )
    if len(set(digests)) == 1:
        return dict(local_values)
    result: dict[str, Any] = {}
    for rank, values in enumerate(ranks.all_gather(local_values)):
        _merge_into(result, values, rank, "values")
    return result


def _merge_into(
    target: dict[str, Any], values: Mapping[str, Any], rank: int, location: str
) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(target.setdefault(key, {}), dict):
            _merge_into(target[key], value, rank, f"{location}.{key}")
        elif target.setdefault(key, value) != value:
            raise SaveFailed(
                f"ranks disagree about {location}.{key}: "
                f"{target[key]!r:.80}, on rank {rank} {value!r:.80}"
            )


def _assign_writers(
    ranks_by_box: RanksByBox,
) -> tuple[dict[str, TensorEntry], dict[tuple[str, Box], int]]:
    """Assign boxes to ranks: those on one rank first, then the largest to the least loaded."""
    loads: dict[int, int] = {}
    takers: dict[tuple[str, Box], int] = {}
    boxes = [
        (DTYPE_BYTES[dtype] * box.num_elements, name, box, holders)
        for name, (dtype, _, by_box) in ranks_by_box.items()
        for box, holders in by_box.items()
    ]
    for size, name, box, holders in sorted(
        boxes, key=lambda item: (len(item[3]) > 1, -item[0], item[1], item[2])
    ):
        writer = min(holders, key=lambda holder: (loads.get(holder, 0), holder))
        loads[writer] = loads.get(writer, 0) + size
        takers[name, box] = writer
    entries = {}
    for name, (dtype, shape, by_box) in ranks_by_box.items():
        slices = [
            StoredSlice(
                _name_shard_file(takers[name, box]),
                name if box == build_full_box(shape) else f"{name}{box}",
                box,
            )
            for box in sorted(by_box)
        ]
        entries[name] = TensorEntry(dtype, shape, tuple(slices))
    return entries, takers


def _name_shard_file(rank: int) -> str:
    return f"shard-{rank:05d}.safetensors"


def _create_folder(ranks: RankGroup, root: StoragePath, step: int, disk: Disk) -> StoragePath:
    """Create the folder to write into, on the first rank, and return its path on all ranks."""
    result = {"folder": "", "fault": None}
    if ranks.is_first:
        try:
            result["folder"] = str(commit.create_saving_folder(root, step, disk).name)
        except (OSError, ShardwrightError) as error:
            result["fault"] = _describe_error(error)
    result = ranks.broadcast_first(result)
    _require_no_faults([result["fault"]], f"nothing was written to {root}")
    return root / str(result["folder"])


def _write_files(
    ranks: RankGroup, plan: SavePlan, values: Mapping[str, Any], folder: StoragePath, disk: Disk
) -> Manifest:
    """Write this rank's file, and values on the first rank; return the common manifest."""
    files: dict[str, list[Any]] = {}
    fault = plan.fault
    try:
        if plan.local_writes:
            files[_name_shard_file(ranks.rank)] = _write_shard(
                folder / _name_shard_file(ranks.rank), plan, disk
            )
        if ranks.is_first:
            text = encode_values(values)
            files[VALUES_NAME] = [len(text), write_file(folder / VALUES_NAME, text, disk)]
        disk.sync_folder(folder)
    except (OSError, RuntimeError, MemoryError, ShardwrightError) as error:
        fault = _describe_error(error)
    reports = ranks.all_gather({"fault": fault, "files": files})
    _require_no_faults([report["fault"] for report in reports], "older checkpoints are intact")
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
    size_bytes = len(header) + sum(
        values.numel() * values.element_size() for *_, values in plan.local_writes
    )
    with create_hashed_file(path, disk, size_bytes) as file:
        file.write(memoryview(header))
        for _, _, _, values in plan.local_writes:
            for block in iterate_blocks(values):
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
            result["fault"] = _describe_error(error)
        if result["fault"] is None and retention is not None:
            try:
                result["removed"] = [
                    path.name for path in commit.prune_checkpoints(root, retention, disk)
                ]
            except OSError as error:  # the save itself succeeded
                logger.warning("could not remove older checkpoints in %s: %s", root, error)
    result = ranks.broadcast_first(result)
    _require_no_faults([result["fault"]], "older checkpoints are intact")
    return root / result["name"], [root / name for name in result["removed"]]


def _describe_error(error: BaseException) -> str:
    """Describe an exception in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    return str(error) or type(error).__name__


def _require_no_faults(faults: list[str | None], consequence: str) -> None:
    """Raise the same SaveFailed on every rank if any rank has a fault."""
    messages = [f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault is not None]
    if messages:
        raise SaveFailed(f"the checkpoint could not be saved; {consequence}. {'; '.join(messages)}")


def _discard_quietly(folder: StoragePath, disk: Disk) -> None:
    """Remove the files of a failed save; if that fails, the next save removes them."""
    try:
        commit.remove_path(folder, disk)
    except OSError as error:
        logger.warning("could not remove %s: %s; the next save will try again", folder, error)
