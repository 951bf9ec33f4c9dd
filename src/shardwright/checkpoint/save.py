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
from shardwright.checkpoint.boxes import Box, fault_of_cover, whole
from shardwright.checkpoint.commit import Keep
from shardwright.checkpoint.direct import new_file
from shardwright.checkpoint.disk import Disk, write_file
from shardwright.checkpoint.exchange import Ranks
from shardwright.checkpoint.header import compose_header
from shardwright.checkpoint.manifest import (
    DTYPE_BYTES,
    VALUES_NAME,
    Manifest,
    Slice,
    StoredFile,
    TensorEntry,
    encode_values,
)
from shardwright.checkpoint.pieces import HeldTensor, Part, blocks, held_tensor
from shardwright.checkpoint.place import Place, place_of
from shardwright.checkpoint.remote import disk_of
from shardwright.errors import SaveFailed, ShardwrightError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedCheckpoint:
    """Result of a save: bytes over all ranks, seconds on this rank, removed checkpoints."""

    path: Place
    step: int
    num_bytes: int
    seconds: float
    removed: tuple[Place, ...] = ()


def save_checkpoint(
    root: str | Place,
    step: int,
    tensors: Mapping[str, torch.Tensor | Part],
    values: Mapping[str, Any],
    *,
    merged: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    keep: Keep | None = None,
    best: bool = False,
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
        merged: further values that are distributed over ranks: objects are merged key by key,
            equal keys must have equal values.
        group: ranks that save together; None is the default group, or this process alone if
            there is none.
        keep: rule for older checkpoints; None removes none.
        best: let `root/best` name this checkpoint.
        disk: file operations; tests pass one that fails.

    Raises:
        SaveFailed: a rank could not write, or the ranks disagree about the tensors. Older
            checkpoints are intact, nothing is left behind, and the run may continue.
    """
    ranks = Ranks(group)
    plan = plan_save(ranks, step, tensors, values, merged)
    return finish_save(ranks, place_of(root), plan, keep=keep, best=best, disk=disk)


@dataclass(frozen=True)
class PlannedSave:
    """Assignment of boxes to ranks, with this rank's share in the order of its file.

    `entries` and `takers` are the same on all ranks.
    """

    step: int
    values: Mapping[str, Any]
    merged: Mapping[str, Any]
    entries: dict[str, TensorEntry]
    takers: dict[tuple[str, Box], int]
    writing: list[tuple[str, str, Box, torch.Tensor]]
    digest: str
    """SHA-256 of this rank's announcement; if no rank's changes, the assignment is reused."""
    versions: tuple[int, ...] = ()
    """Version counters of the tensors of `writing`, which copying must not change."""
    fault: str | None = None
    """Reason why this rank cannot write; all ranks learn it before anything is published."""

    def copied(self, copy: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]) -> PlannedSave:
        """Return a plan that writes copies, so that the originals may change."""
        originals = [values for *_, values in self.writing]
        try:
            copies = copy(originals)
        except (RuntimeError, MemoryError) as error:
            return replace(self, writing=[], fault=f"not enough host memory for the copy: {_fault(error)}")
        if _versions(originals) != self.versions:
            return replace(self, writing=[], fault="a tensor changed while it was copied")
        return replace(self, writing=[(*item[:3], values) for item, values in zip(self.writing, copies, strict=True)])


def plan_save(
    ranks: Ranks,
    step: int,
    tensors: Mapping[str, torch.Tensor | Part],
    values: Mapping[str, Any],
    merged: Mapping[str, Any] | None = None,
    *,
    before: PlannedSave | None = None,
) -> PlannedSave:
    """Assign boxes to ranks; writes nothing yet. See `save_checkpoint`.

    `before` is the plan of an earlier save, reused if no rank's boxes have changed; then boxes
    are not exchanged again.
    """
    local_tensors, digest, is_unchanged = _announced(ranks, step, tensors, values, merged or {}, before)
    if is_unchanged:
        assert before is not None
        entries = before.entries
        takers = before.takers
    else:
        entries, takers = _assigned(_told(ranks, local_tensors))
    writing = [
        (name, tensor.dtype, piece.box, piece.values)
        for name, tensor in local_tensors.items()
        for piece in tensor.pieces
        if takers[name, piece.box] == ranks.rank
    ]
    # Wide elements first, so that every tensor starts at a multiple of its element size.
    writing.sort(key=lambda item: (-DTYPE_BYTES[item[1]], item[0], item[2]))
    return PlannedSave(
        step, values, merged or {}, entries, takers, writing, digest, versions=_versions([tensor for *_, tensor in writing])
    )


def _versions(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return torch's counts of in-place changes; 0 for inference tensors, which have none."""
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)


def finish_save(
    ranks: Ranks, root: Place, planned: PlannedSave, *, keep: Keep | None, best: bool, disk: Disk | None
) -> SavedCheckpoint:
    """Write and publish a planned save, then prune. See `save_checkpoint`."""
    start = time.monotonic()
    disk = disk or disk_of(root)
    folder: Place | None = None
    try:
        values = {**planned.values, **_merged(ranks, planned.merged)}
        folder = _begun(ranks, root, planned.step, disk)
        manifest = _written(ranks, planned, values, folder, disk)
        path, removed = _committed(ranks, root, folder, manifest, keep, best, disk)
    except SaveFailed:
        if folder is not None and ranks.is_first and folder.exists():
            _discard_quietly(folder, disk)
        raise
    return SavedCheckpoint(path, planned.step, manifest.num_bytes, time.monotonic() - start, tuple(removed))


Held = dict[str, tuple[str, tuple[int, ...], dict[Box, list[int]]]]
"""Dtype, shape and ranks by box of every tensor, by name, over all ranks."""


def _announced(
    ranks: Ranks,
    step: int,
    tensors: Mapping[str, torch.Tensor | Part],
    values: Mapping[str, Any],
    merged: Mapping[str, Any],
    before: PlannedSave | None,
) -> tuple[dict[str, HeldTensor], str, bool]:
    """Return this rank's tensors, their digest, and True if no rank's digest has changed.

    Invalid input of one rank is an error on all.
    """
    local_tensors: dict[str, HeldTensor] = {}
    fault = None
    try:
        local_tensors = {name: held_tensor(name, tensor) for name, tensor in tensors.items()}
        encode_values({**values, **merged})
    except ShardwrightError as error:
        fault = str(error)
    digest = hashlib.sha256(json.dumps(_spelled(local_tensors)).encode()).hexdigest()
    is_unchanged = before is not None and before.digest == digest
    reports = ranks.gather([step, fault, is_unchanged])
    _require_no_faults([report[1] for report in reports], "nothing was written")
    if len(steps := {report[0] for report in reports}) > 1:
        raise SaveFailed(f"ranks save different steps: {sorted(steps)}")
    return local_tensors, digest, all(report[2] for report in reports)


def _spelled(mine: Mapping[str, HeldTensor]) -> dict[str, Any]:
    return {
        name: [tensor.dtype, tensor.shape, [[p.box.offsets, p.box.lengths] for p in tensor.pieces]] for name, tensor in mine.items()
    }


def _told(ranks: Ranks, mine: Mapping[str, HeldTensor]) -> Held:
    """Gather the boxes of all ranks and check that they cover every tensor exactly once."""
    entries: Held = {}
    for rank, rank_tensors in enumerate(ranks.gather(_spelled(mine))):
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
        if fault := fault_of_cover(shape, list(holders)):
            raise SaveFailed(f"the ranks together do not hold {name} exactly once: {fault}")
    return entries


def _merged(ranks: Ranks, mine: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the objects of all ranks, which are sent in full only if they differ."""
    digests = ranks.gather(hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest())
    if len(set(digests)) == 1:
        return dict(mine)
    result: dict[str, Any] = {}
    for rank, values in enumerate(ranks.gather(mine)):
        _merge_into(result, values, rank, "values")
    return result


def _merge_into(whole: dict[str, Any], told: Mapping[str, Any], rank: int, place: str) -> None:
    for key, value in told.items():
        if isinstance(value, dict) and isinstance(whole.setdefault(key, {}), dict):
            _merge_into(whole[key], value, rank, f"{place}.{key}")
        elif whole.setdefault(key, value) != value:
            raise SaveFailed(
                f"ranks disagree about {place}.{key}: "
                f"{whole[key]!r:.80}, on rank {rank} {value!r:.80}"
            )


def _assigned(held: Held) -> tuple[dict[str, TensorEntry], dict[tuple[str, Box], int]]:
    """Assign boxes to ranks: those on one rank first, then the largest to the least loaded."""
    loads: dict[int, int] = {}
    takers: dict[tuple[str, Box], int] = {}
    boxes = [
        (DTYPE_BYTES[dtype] * box.num_elements, name, box, holders)
        for name, (dtype, _, by_box) in held.items()
        for box, holders in by_box.items()
    ]
    for size, name, box, holders in sorted(boxes, key=lambda item: (len(item[3]) > 1, -item[0], item[1], item[2])):
        writer = min(holders, key=lambda holder: (loads.get(holder, 0), holder))
        loads[writer] = loads.get(writer, 0) + size
        takers[name, box] = writer
    entries = {}
    for name, (dtype, shape, by_box) in held.items():
        slices = [
            Slice(_file_of(takers[name, box]), name if box == whole(shape) else f"{name}{box}", box) for box in sorted(by_box)
        ]
        entries[name] = TensorEntry(dtype, shape, tuple(slices))
    return entries, takers


def _file_of(rank: int) -> str:
    return f"shard-{rank:05d}.safetensors"


def _begun(ranks: Ranks, root: Place, step: int, disk: Disk) -> Place:
    """Create the folder to write into, on the first rank, and return its path on all ranks."""
    result = {"folder": "", "fault": None}
    if ranks.is_first:
        try:
            result["folder"] = str(commit.begin(root, step, disk).name)
        except (OSError, ShardwrightError) as error:
            result["fault"] = _fault(error)
    result = ranks.from_first(result)
    _require_no_faults([result["fault"]], f"nothing was written to {root}")
    return root / str(result["folder"])


def _written(ranks: Ranks, planned: PlannedSave, values: Mapping[str, Any], folder: Place, disk: Disk) -> Manifest:
    """Write this rank's file, and values on the first rank; return the common manifest."""
    files: dict[str, list[Any]] = {}
    fault = planned.fault
    try:
        if planned.writing:
            files[_file_of(ranks.rank)] = _write_shard(folder / _file_of(ranks.rank), planned, disk)
        if ranks.is_first:
            text = encode_values(values)
            files[VALUES_NAME] = [len(text), write_file(folder / VALUES_NAME, text, disk)]
        disk.sync_folder(folder)
    except (OSError, RuntimeError, MemoryError, ShardwrightError) as error:
        fault = _fault(error)
    reports = ranks.gather({"fault": fault, "files": files})
    _require_no_faults([report["fault"] for report in reports], "older checkpoints are intact")
    return Manifest(
        step=planned.step,
        world_size=ranks.world_size,
        files={name: StoredFile(*file) for report in reports for name, file in report["files"].items()},
        tensors=planned.entries,
        written_by=f"shardwright {__version__}, torch {torch.__version__}",
    )


def _write_shard(path: Place, planned: PlannedSave, disk: Disk) -> list[Any]:
    """Write this rank's file; return its size in bytes and SHA-256."""
    keys = {(name, part.box): part.key for name, entry in planned.entries.items() for part in entry.slices}
    header = compose_header([(keys[name, box], dtype, box.lengths) for name, dtype, box, _ in planned.writing])
    size_bytes = len(header) + sum(values.numel() * values.element_size() for *_, values in planned.writing)
    with new_file(path, disk, size_bytes) as file:
        file.write(memoryview(header))
        for _, _, _, values in planned.writing:
            for block in blocks(values):
                file.write(block)
        sha256 = file.finish()
        return [file.size_bytes, sha256]


def _committed(
    ranks: Ranks, root: Place, folder: Place, manifest: Manifest, keep: Keep | None, best: bool, disk: Disk
) -> tuple[Place, list[Place]]:
    """Publish and prune on the first rank; return checkpoint and removed paths on all."""
    result: dict[str, Any] = {"name": "", "removed": [], "fault": None}
    if ranks.is_first:
        try:
            result["name"] = commit.publish(root, folder, manifest, best=best, disk=disk).name
        except (OSError, ShardwrightError) as error:
            result["fault"] = _fault(error)
        if result["fault"] is None and keep is not None:
            try:
                result["removed"] = [path.name for path in commit.prune(root, keep, disk)]
            except OSError as error:  # the save itself succeeded
                logger.warning("could not remove older checkpoints in %s: %s", root, error)
    result = ranks.from_first(result)
    _require_no_faults([result["fault"]], "older checkpoints are intact")
    return root / result["name"], [root / name for name in result["removed"]]


def _fault(error: BaseException) -> str:
    """Describe an exception in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    return str(error) or type(error).__name__


def _require_no_faults(faults: list[str | None], consequence: str) -> None:
    """Raise the same SaveFailed on every rank if any rank has a fault."""
    messages = [f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault is not None]
    if messages:
        raise SaveFailed(f"the checkpoint could not be saved; {consequence}. {'; '.join(messages)}")


def _discard_quietly(folder: Place, disk: Disk) -> None:
    """Remove the files of a failed save; if that fails, the next save removes them."""
    try:
        commit.discard(folder, disk)
    except OSError as error:
        logger.warning("could not remove %s: %s; the next save will try again", folder, error)
