"""Loading of checkpoints into tensors of any layout; each rank reads only its own parts.

Nothing is parsed before its hash is verified. No tensor changes before all ranks know that the
checkpoint is intact and matches.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.checkpoint.boxes import Box
from shardwright.checkpoint.disk import open_regular_file
from shardwright.checkpoint.header import HeaderEntry, read_header
from shardwright.checkpoint.integrity import (
    ObjectCache,
    RefusedCheckpoint,
    VerifiedCheckpoint,
)
from shardwright.checkpoint.local_tensors import (
    DTYPE_NAMES,
    LocalTensor,
    ParameterShard,
    describe_local_tensor,
)
from shardwright.checkpoint.manifest import DTYPE_BYTES, Manifest
from shardwright.checkpoint.rank_group import RankGroup
from shardwright.checkpoint.rank_verification import (
    list_candidates_on_all_ranks,
    verify_on_all_ranks,
)
from shardwright.checkpoint.run_values import RunValues, parse_values, read_values_file
from shardwright.checkpoint.storage_path import (
    BLOCK_BYTES,
    NUM_PARALLEL_READS,
    ReadableFile,
    StoragePath,
    parse_storage_path,
)
from shardwright.errors import CheckpointError, ShardwrightError
from shardwright.hardware.host_memory import read_available_memory

logger = logging.getLogger(__name__)

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_MAX_SHOWN_DIFFERENCES = 20
_SHORT_RUN_BYTES = 64 * 1024
"""Shorter runs are read with the bytes between them: each read loads at least a page anyway."""


def find_newest_checkpoint(
    root: str | StoragePath,
    *,
    group: dist.ProcessGroup | None = None,
    should_cache: bool = False,
) -> VerifiedCheckpoint | None:
    """Find the newest intact checkpoint of a root, or None, the same on all ranks of `group`.

    The newest is the one that `latest` names; if it is damaged, the newest one before it, and a
    warning names the damaged ones. Every byte has been hashed, each file by one rank;
    `load_checkpoint` does not hash the result again.

    Args:
        should_cache: Keep the objects that this rank hashes in host memory until
            `load_checkpoint` has used them, as far as memory allows; see `ObjectCache`.
    """
    ranks = RankGroup(group)
    root = parse_storage_path(root)
    names, reasons = list_candidates_on_all_ranks(ranks, root)
    refused = [RefusedCheckpoint(root / name, reason) for name, reason in reasons]
    for name in names:
        path = root / name
        cache = _build_object_cache(ranks) if should_cache else None
        manifest, faults = verify_on_all_ranks(ranks, path, cache)
        if manifest is not None and not faults:
            checkpoint = VerifiedCheckpoint(path, manifest, tuple(refused), cache)
            if refused and ranks.is_first:
                lost = "; ".join(map(str, refused))
                logger.warning(
                    "falling back from %s to %s: %s", refused[0].path.name, path.name, lost
                )
            return checkpoint
        refused.append(RefusedCheckpoint.from_faults(path, faults))
    if refused and ranks.is_first:
        logger.warning("no checkpoint in %s can be used: %s", root, "; ".join(map(str, refused)))
    return None


def _build_object_cache(ranks: RankGroup) -> ObjectCache:
    """Return a store of this process's share of half of the host memory that is available."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks.world_size)
    return ObjectCache((read_available_memory() or 0) // (2 * num_ranks))


def open_checkpoint(
    path: str | StoragePath,
    *,
    group: dist.ProcessGroup | None = None,
    should_cache: bool = False,
) -> VerifiedCheckpoint:
    """Open a checkpoint folder and verify every byte. Collective over `group`.

    Args:
        should_cache: As for `find_newest_checkpoint`.

    Raises:
        CheckpointError: the checkpoint is damaged or incomplete; the message lists the faults.
    """
    ranks = RankGroup(group)
    cache = _build_object_cache(ranks) if should_cache else None
    manifest, faults = verify_on_all_ranks(ranks, parse_storage_path(path), cache)
    if manifest is None or faults:
        shown = "; ".join(faults[:_MAX_SHOWN_DIFFERENCES])
        raise CheckpointError(f"this checkpoint cannot be used: {shown}", field=str(path))
    return VerifiedCheckpoint(parse_storage_path(path), manifest, cache=cache)


def read_values(
    checkpoint: VerifiedCheckpoint, *, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Read the JSON values of a verified checkpoint, to check them before any tensor changes.

    Collective over `group`; the first rank reads.

    Raises:
        CheckpointError: the values are not a JSON object, or cannot be read.
    """
    ranks = RankGroup(group)
    result: dict[str, Any] = {"values": {}, "fault": None}
    if ranks.is_first:
        try:
            result["values"] = read_values_file(checkpoint.path)
        except CheckpointError as error:
            got = None if error.got is None else str(error.got)
            result["fault"] = [error.problem, error.field, got, error.allowed, error.remedy]
        except OSError as error:
            result["fault"] = [f"cannot be read: {error}", str(checkpoint.path), None, None, None]
    result = ranks.broadcast_first(result)
    if result["fault"] is not None:
        problem, field, got, allowed, remedy = result["fault"]
        raise CheckpointError(problem, field=field, got=got, allowed=allowed, remedy=remedy)
    values: dict[str, Any] = result["values"]
    return values


def read_run_values(
    checkpoint: VerifiedCheckpoint, *, group: dist.ProcessGroup | None = None
) -> RunValues:
    """Read and check the values of a checkpoint that training wrote. Collective over `group`.

    Raises:
        CheckpointError: the values cannot be read, or a field is invalid. The same error on
            every rank.
    """
    return parse_values(read_values(checkpoint, group=group), checkpoint.path, step=checkpoint.step)


def load_checkpoint(
    checkpoint: str | StoragePath | VerifiedCheckpoint,
    tensors: Mapping[str, torch.Tensor | ParameterShard],
    *,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load `tensors` in place and return the values. Collective over `group`.

    Args:
        checkpoint: a folder, which is hashed first, or the result of `find_newest_checkpoint`,
            which has been hashed already.
        tensors: plain tensors or DTensors of any layout by name; the ranks together must name
            exactly the saved tensors.
        group: ranks that load together; None is the default group, or this process alone.

    Raises:
        CheckpointError: damage, or tensors that are missing, surplus or of another shape or
            dtype. Raised on every rank before any tensor changes; only a file that becomes
            unreadable after it was hashed can leave tensors partly loaded.
    """
    ranks = RankGroup(group)
    verified = (
        checkpoint
        if isinstance(checkpoint, VerifiedCheckpoint)
        else open_checkpoint(checkpoint, group=group, should_cache=True)
    )
    values = read_values(verified, group=group)
    local_tensors = _match_tensors(ranks, verified, tensors)
    fault = None
    try:
        with _OpenFiles(verified) as files:
            _fill_tensors(local_tensors, verified, files)
    except (ShardwrightError, OSError, RuntimeError) as error:
        fault = str(error)
    if verified.cache is not None:
        verified.cache.blocks.clear()
    faults = [
        f"rank {rank}: {fault}"
        for rank, fault in enumerate(ranks.all_gather(fault))
        if fault is not None
    ]
    if faults:
        raise CheckpointError(
            f"could not be read; tensors may be partly loaded. {'; '.join(faults)}",
            field=str(verified.path),
        )
    return values


def read_tensor(checkpoint: VerifiedCheckpoint, name: str) -> torch.Tensor:
    """Read one whole tensor from all its slices, in this process alone.

    Raises:
        CheckpointError: a file became unreadable after it was hashed.
    """
    entry = checkpoint.manifest.tensors[name]
    tensor = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
    with _OpenFiles(checkpoint) as files:
        _fill_tensor(describe_local_tensor(name, tensor), name, checkpoint.manifest, files)
    return tensor


def _match_tensors(
    ranks: RankGroup,
    checkpoint: VerifiedCheckpoint,
    tensors: Mapping[str, torch.Tensor | ParameterShard],
) -> dict[str, LocalTensor]:
    """Return the local tensors after comparing all ranks' tensors with the checkpoint."""
    local_tensors: dict[str, LocalTensor] = {}
    problems: list[str] = []
    for name, tensor in tensors.items():
        try:
            local_tensors[name] = describe_local_tensor(name, tensor)
        except ShardwrightError as error:
            problems.append(str(error))
            continue
        saved = checkpoint.manifest.tensors.get(name)
        if saved is None:
            problems.append(f"missing {name}: not in the checkpoint")
        elif saved.shape != local_tensors[name].shape:
            problems.append(
                f"{name} has shape {saved.shape} in the "
                f"checkpoint, {local_tensors[name].shape} here"
            )
        elif saved.dtype != local_tensors[name].dtype:
            problems.append(
                f"{name} is {saved.dtype} in the checkpoint, {local_tensors[name].dtype} here"
            )
    reports = ranks.all_gather({"names": sorted(tensors), "problems": problems})
    differences = {problem for report in reports for problem in report["problems"]}
    requested = {name for report in reports for name in report["names"]}
    differences |= {
        f"surplus {name}: in the checkpoint, but on no rank"
        for name in set(checkpoint.manifest.tensors) - requested
    }
    if differences:
        listed = sorted(differences)[:_MAX_SHOWN_DIFFERENCES]
        rest = f"; {len(differences) - len(listed)} more" if len(differences) > len(listed) else ""
        raise CheckpointError(
            f"its tensors do not match the run: {'; '.join(listed)}{rest}",
            field=str(checkpoint.path),
        )
    return local_tensors


class _OpenFiles:
    """Files of a checkpoint; each is opened and its header read at first use, by any thread."""

    def __init__(self, checkpoint: VerifiedCheckpoint) -> None:
        self._folder = checkpoint.path
        self._cache = checkpoint.cache
        self._opening = threading.Lock()
        self._open: dict[str, tuple[ReadableFile, dict[str, HeaderEntry]]] = {}

    def __enter__(self) -> _OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for opened, _entries in self._open.values():
            opened.close()

    def find(self, file: str, key: str) -> tuple[ReadableFile, HeaderEntry]:
        """Return the open file and the header entry of a slice."""
        with self._opening:
            if file not in self._open:
                path = self._folder / file
                cache = None if self._cache is None else self._cache.find(file)
                with ExitStack() as opening:
                    opened = opening.enter_context(cache or open_regular_file(path))
                    self._open[file] = (opened, read_header(path, opened))
                    opening.pop_all()  # it stays open
        opened, entries = self._open[file]
        if key not in entries:
            raise CheckpointError(f"{file} no longer contains {key}", field=str(self._folder))
        return opened, entries[key]


def _fill_tensors(
    local_tensors: Mapping[str, LocalTensor], checkpoint: VerifiedCheckpoint, files: _OpenFiles
) -> None:
    """Fill all tensors; of an object store several at the same time, because a request waits."""

    def fill(item: tuple[str, LocalTensor]) -> None:
        name, tensor = item
        with torch.no_grad():  # holds for one thread
            _fill_tensor(tensor, name, checkpoint.manifest, files)

    if isinstance(checkpoint.path, Path):
        for item in local_tensors.items():
            fill(item)
        return
    with ThreadPoolExecutor(NUM_PARALLEL_READS, "checkpoint-download") as pool:
        try:
            for _ in pool.map(fill, local_tensors.items()):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _fill_tensor(
    local_tensor: LocalTensor, name: str, manifest: Manifest, files: _OpenFiles
) -> None:
    """Copy every stored slice into the local slices that overlap it."""
    for local_slice in local_tensor.slices:
        for stored_slice in manifest.tensors[name].slices:
            shared = local_slice.box.intersect(stored_slice.box)
            if shared is not None:
                file, stored = files.find(stored_slice.file, stored_slice.key)
                target = view_box(local_slice.values, shared.rebase(local_slice.box))
                read_box(
                    file, stored, stored_slice.box.lengths, shared.rebase(stored_slice.box), target
                )


def view_box(values: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the view of a tensor in `box`, whose offsets are relative to the tensor."""
    for dim, (start, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
        values = values.narrow(dim, start, length)
    return values


def read_box(
    file: ReadableFile, stored: HeaderEntry, shape: tuple[int, ...], box: Box, target: torch.Tensor
) -> None:
    """Read part `box` of a stored slice of `shape` into `target`.

    A contiguous run of bytes is read directly into host memory. Otherwise, if the span from the
    first to the last needed byte fits a block and its runs are too short for a system call
    each, the span is read and indexed by strides; else the box is halved.
    """
    item = DTYPE_BYTES[stored.dtype]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    span_bytes = item * (
        1 + sum((length - 1) * stride for length, stride in zip(box.lengths, strides, strict=True))
    )
    is_run = span_bytes == item * box.num_elements
    position = stored.start_byte + item * start
    if is_run and target.device.type == "cpu" and target.is_contiguous():
        _read_into(file, position, target.view(-1).view(torch.uint8))
    elif span_bytes <= BLOCK_BYTES and (
        is_run or item * _count_run_elements(shape, box) < _SHORT_RUN_BYTES
    ):
        staged = torch.empty(span_bytes, dtype=torch.uint8)
        _read_into(file, position, staged)
        target.copy_(staged.view(_DTYPES[stored.dtype]).as_strided(box.lengths, strides))
    else:
        dim = next(dim for dim, length in enumerate(box.lengths) if length > 1)
        half = box.lengths[dim] // 2
        for begin, length in ((0, half), (half, box.lengths[dim] - half)):
            offsets = tuple(offset + begin * (d == dim) for d, offset in enumerate(box.offsets))
            lengths = tuple(length if d == dim else full for d, full in enumerate(box.lengths))
            read_box(file, stored, shape, Box(offsets, lengths), target.narrow(dim, begin, length))


def _count_run_elements(shape: tuple[int, ...], box: Box) -> int:
    """Return how many elements of the box are contiguous in the file."""
    run = 1
    for length, size in zip(reversed(box.lengths), reversed(shape), strict=True):
        run *= length
        if length != size:
            break
    return run


def _read_into(file: ReadableFile, position: int, data_N: torch.Tensor) -> None:
    """Fill a host tensor of bytes from a file, starting at byte `position`."""
    view = data_N.numpy().data
    while view:
        count = file.read_into(position, view)
        if count == 0:
            raise CheckpointError("a file ended early: it was changed after it was hashed")
        view = view[count:]
        position += count
