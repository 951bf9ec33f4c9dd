"""Saving: each rank writes what it holds, no copy twice, nothing gathered; all ranks agree on the outcome.

Who writes what: every rank announces its boxes; a box that several hold goes to the one of them with the least to write so far.
All ranks compute this from the same announcements, so no decision travels.
Why not DCP's planners: docs/decisions/0020-checkpoint-format.md.
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
    """What a save did: bytes over all ranks, seconds on this one, older checkpoints removed."""

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
    """Write a checkpoint to `root/step-<step>`; every rank of `group` calls this, and every rank returns or every rank raises.

    Args:
        root: folder or fsspec URL of one run's checkpoints, the same for all ranks (shared if they are on several machines).
        step: optimizer steps done.
        tensors: by name. Plain tensors are copies that all ranks naming them hold alike; DTensors say themselves who holds what.
            Ranks may name different tensors (pipeline stages).
        values: everything else, JSON; the first rank's are written.
        merged: more values, of which each rank knows a part: objects put together key by key. What several ranks say must be equal.
        group: ranks that save together; None is the default group, or this process alone if there is none.
        keep: which older checkpoints stay; None removes none.
        best: let `root/best` name this checkpoint.
        disk: where the tests put one that fails.

    Raises:
        SaveFailed: some rank could not write, or the ranks disagree about the tensors. Older checkpoints are whole, nothing is left
            behind, and the run may go on.
    """
    ranks = Ranks(group)
    planned = plan_save(ranks, step, tensors, values, merged)
    return finish_save(ranks, place_of(root), planned, keep=keep, best=best, disk=disk)


@dataclass(frozen=True)
class PlannedSave:
    """Who writes which box, in the order of each file: `entries` are the same on every rank, `writing` is this rank's share."""

    step: int
    values: Mapping[str, Any]
    merged: Mapping[str, Any]
    entries: dict[str, TensorEntry]
    takers: dict[tuple[str, Box], int]
    writing: list[tuple[str, str, Box, torch.Tensor]]
    digest: str
    """Of what this rank announced: while it stays the same on every rank, so does who writes what."""
    versions: tuple[int, ...] = ()
    """How often each tensor of `writing` had been changed in place: it must be no more often when its copy is done."""
    fault: str | None = None
    """What kept this rank from being able to write its share; every rank is told before anything is published."""

    def copied(self, copy: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]) -> PlannedSave:
        """With this rank's share copied, so that the originals may change."""
        originals = [values for *_, values in self.writing]
        try:
            copies = copy(originals)
        except (RuntimeError, MemoryError) as error:
            return replace(self, writing=[], fault=f"no host memory for the copy: {_fault(error)}")
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
    """Agree on who writes what; nothing is written yet. See `save_checkpoint`.

    `before` is the plan of an earlier save: where all ranks hold what they held then, nothing but that is told.
    """
    mine, digest, everyone_holds_the_same = _announced(ranks, step, tensors, values, merged or {}, before)
    if everyone_holds_the_same:
        assert before is not None
        entries, takers = before.entries, before.takers
    else:
        entries, takers = _assigned(_told(ranks, mine))
    writing = [
        (name, tensor.dtype, piece.box, piece.values)
        for name, tensor in mine.items()
        for piece in tensor.pieces
        if takers[name, piece.box] == ranks.rank
    ]
    # Wide elements first, so that every tensor's bytes begin at a multiple of its element size.
    writing.sort(key=lambda item: (-DTYPE_BYTES[item[1]], item[0], item[2]))
    return PlannedSave(
        step, values, merged or {}, entries, takers, writing, digest, versions=_versions([tensor for *_, tensor in writing])
    )


def _versions(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Torch's count of changes in place; 0 for tensors of inference mode, which have none."""
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)


def finish_save(
    ranks: Ranks, root: Place, planned: PlannedSave, *, keep: Keep | None, best: bool, disk: Disk | None
) -> SavedCheckpoint:
    """Write, publish and prune what was planned. See `save_checkpoint`."""
    begun, disk = time.monotonic(), disk or disk_of(root)
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
    return SavedCheckpoint(path, planned.step, manifest.num_bytes, time.monotonic() - begun, tuple(removed))


Held = dict[str, tuple[str, tuple[int, ...], dict[Box, list[int]]]]
"""What all ranks hold: per name dtype, shape, and by box the ranks that hold it."""


def _announced(
    ranks: Ranks,
    step: int,
    tensors: Mapping[str, torch.Tensor | Part],
    values: Mapping[str, Any],
    merged: Mapping[str, Any],
    before: PlannedSave | None,
) -> tuple[dict[str, HeldTensor], str, bool]:
    """What this rank holds, its digest, and whether every rank holds what it held before; wrong input on one is an error on all."""
    mine: dict[str, HeldTensor] = {}
    fault = None
    try:
        mine = {name: held_tensor(name, tensor) for name, tensor in tensors.items()}
        encode_values({**values, **merged})
    except ShardwrightError as error:
        fault = str(error)
    digest = hashlib.sha256(json.dumps(_spelled(mine)).encode()).hexdigest()
    same = before is not None and before.digest == digest
    everyone = ranks.gather([step, fault, same])
    _require_no_faults([rank_told[1] for rank_told in everyone], "nothing was written")
    if len(steps := {rank_told[0] for rank_told in everyone}) > 1:
        raise SaveFailed(f"ranks save different steps: {sorted(steps)}")
    return mine, digest, all(rank_told[2] for rank_told in everyone)


def _spelled(mine: Mapping[str, HeldTensor]) -> dict[str, Any]:
    return {name: [held.dtype, held.shape, [[p.box.offsets, p.box.lengths] for p in held.pieces]] for name, held in mine.items()}


def _told(ranks: Ranks, mine: Mapping[str, HeldTensor]) -> Held:
    """Tell each other what there is, and see that it is all there once."""
    entries: Held = {}
    for rank, rank_told in enumerate(ranks.gather(_spelled(mine))):
        for name, (dtype, shape, boxes) in rank_told.items():
            entry = entries.setdefault(name, (dtype, tuple(shape), {}))
            if entry[:2] != (dtype, tuple(shape)):
                raise SaveFailed(f"ranks disagree about {name}: {entry[0]} {entry[1]}, on rank {rank} {dtype} {tuple(shape)}")
            for offsets, lengths in boxes:
                entry[2].setdefault(Box(tuple(offsets), tuple(lengths)), []).append(rank)
    for name, (_, shape, holders) in entries.items():
        if fault := fault_of_cover(shape, list(holders)):
            raise SaveFailed(f"the ranks together do not hold {name} exactly once: {fault}")
    return entries


def _merged(ranks: Ranks, mine: Mapping[str, Any]) -> dict[str, Any]:
    """All ranks' objects as one; told in full only where they differ (pipeline stages know their own parameters)."""
    digests = ranks.gather(hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest())
    if len(set(digests)) == 1:
        return dict(mine)
    whole: dict[str, Any] = {}
    for rank, told in enumerate(ranks.gather(mine)):
        _merge_into(whole, told, rank, "values")
    return whole


def _merge_into(whole: dict[str, Any], told: Mapping[str, Any], rank: int, place: str) -> None:
    for key, value in told.items():
        if isinstance(value, dict) and isinstance(whole.setdefault(key, {}), dict):
            _merge_into(whole[key], value, rank, f"{place}.{key}")
        elif whole.setdefault(key, value) != value:
            raise SaveFailed(f"ranks disagree about {place}.{key}: {whole[key]!r:.80}, on rank {rank} {value!r:.80}")


def _assigned(held: Held) -> tuple[dict[str, TensorEntry], dict[tuple[str, Box], int]]:
    """Boxes that one rank alone holds go to it, then each copy, largest first, to the holder with the least to write."""
    loads: dict[int, int] = {}
    takers: dict[tuple[str, Box], int] = {}
    boxes = [
        (DTYPE_BYTES[dtype] * box.num_elements, name, box, holders)
        for name, (dtype, _, by_box) in held.items()
        for box, holders in by_box.items()
    ]
    for size, name, box, holders in sorted(boxes, key=lambda item: (len(item[3]) > 1, -item[0], item[1], item[2])):
        taker = min(holders, key=lambda holder: (loads.get(holder, 0), holder))
        loads[taker] = loads.get(taker, 0) + size
        takers[name, box] = taker
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
    """The folder to write into, made by the first rank."""
    told = {"folder": "", "fault": None}
    if ranks.is_first:
        try:
            told["folder"] = str(commit.begin(root, step, disk).name)
        except (OSError, ShardwrightError) as error:
            told["fault"] = _fault(error)
    told = ranks.from_first(told)
    _require_no_faults([told["fault"]], f"nothing was written to {root}")
    return root / str(told["folder"])


def _written(ranks: Ranks, planned: PlannedSave, values: Mapping[str, Any], folder: Place, disk: Disk) -> Manifest:
    """Every rank writes its file, the first one the values too; the manifest of all."""
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
    everyone = ranks.gather({"fault": fault, "files": files})
    _require_no_faults([told["fault"] for told in everyone], "older checkpoints are whole")
    return Manifest(
        step=planned.step,
        world_size=ranks.world_size,
        files={name: StoredFile(*file) for told in everyone for name, file in told["files"].items()},
        tensors=planned.entries,
        written_by=f"shardwright {__version__}, torch {torch.__version__}",
    )


def _write_shard(path: Place, planned: PlannedSave, disk: Disk) -> list[Any]:
    """Write a rank's file; its size in bytes and SHA-256."""
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
    """The first rank publishes and prunes; all ranks learn how it went."""
    told: dict[str, Any] = {"name": "", "removed": [], "fault": None}
    if ranks.is_first:
        try:
            told["name"] = commit.publish(root, folder, manifest, best=best, disk=disk).name
        except (OSError, ShardwrightError) as error:
            told["fault"] = _fault(error)
        if told["fault"] is None and keep is not None:
            try:
                told["removed"] = [path.name for path in commit.prune(root, keep, disk)]
            except OSError as error:  # the save itself is done; say it and go on
                logger.warning("could not remove older checkpoints of %s: %s", root, error)
    told = ranks.from_first(told)
    _require_no_faults([told["fault"]], "older checkpoints are whole")
    return root / told["name"], [root / name for name in told["removed"]]


def _fault(error: BaseException) -> str:
    """One line about an exception."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    return str(error) or type(error).__name__


def _require_no_faults(faults: list[str | None], consequence: str) -> None:
    """Raise the same SaveFailed on every rank if any rank met a fault."""
    met = [f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault is not None]
    if met:
        raise SaveFailed(f"the checkpoint could not be saved; {consequence}. {'; '.join(met)}")


def _discard_quietly(folder: Place, disk: Disk) -> None:
    """Remove what a failed save wrote; if even that fails, the next save does it."""
    try:
        commit.discard(folder, disk)
    except OSError as error:
        logger.warning("could not remove %s: %s; the next save will", folder, error)
