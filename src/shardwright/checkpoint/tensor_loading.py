"""Loading of checkpoints into tensors of any layout; each rank reads only its own parts.

Nothing is parsed before its hash is verified. No tensor changes before all ranks know that the
checkpoint is intact and matches.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwright.checkpoint.box_reading import (
    DTYPES,
    BoxRead,
    StoredPart,
    group_reads,
    load_group,
    plan_reads,
    view_box,
)
from shardwright.checkpoint.disk import open_regular_file
from shardwright.checkpoint.header import HeaderEntry, read_header
from shardwright.checkpoint.integrity import (
    ObjectCache,
    RefusedCheckpoint,
    VerifiedCheckpoint,
)
from shardwright.checkpoint.local_tensors import (
    LocalTensor,
    ParameterShard,
    describe_local_tensor,
    find_non_finite,
)
from shardwright.checkpoint.manifest import VALUES_NAME, Manifest
from shardwright.checkpoint.part_exchange import exchange_parts
from shardwright.checkpoint.rank_group import RankGroup
from shardwright.checkpoint.rank_verification import (
    list_candidates_on_all_ranks,
    verify_on_all_ranks,
)
from shardwright.checkpoint.run_values import RunValues, parse_values, read_values_file
from shardwright.checkpoint.storage_path import (
    NUM_PARALLEL_READS,
    ReadableFile,
    StoragePath,
    parse_storage_path,
)
from shardwright.errors import CheckpointError, NonFiniteCheckpoint, ShardwrightError
from shardwright.hardware.host_memory import read_available_memory

logger = logging.getLogger(__name__)

_MAX_SHOWN_DIFFERENCES = 20

_Item = TypeVar("_Item")


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
    """Return a store that may use this process's share of half of the available host memory."""
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
        raise CheckpointError(
            f"this checkpoint cannot be used: {_join_shown(faults)}", field=str(path)
        )
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
            cache = checkpoint.cache
            file = None if cache is None else cache.find(VALUES_NAME)
            result["values"] = read_values_file(checkpoint.path, file)
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
    allow_non_finite: bool = False,
    converts_dtypes: bool = False,
) -> dict[str, Any]:
    """Load `tensors` in place and return the values. Collective over `group`.

    Args:
        checkpoint: a folder, which is hashed first, or the result of `find_newest_checkpoint`,
            which has been hashed already.
        tensors: plain tensors or DTensors of any layout by name; the ranks together must name
            exactly the saved tensors.
        group: ranks that load together; None is the default group, or this process alone.
        allow_non_finite: Warn of tensors that contain NaN or infinity instead of raising.
        converts_dtypes: Convert floating-point tensors of other dtypes, which are read to host
            memory first, instead of raising.

    Raises:
        CheckpointError: damage, or tensors that are missing, surplus or of another shape or
            dtype. Raised on every rank before any tensor changes; only a file that becomes
            unreadable after it was hashed can leave tensors partly loaded.
        NonFiniteCheckpoint: tensors contain NaN or infinity. Raised on every rank, after all
            tensors were loaded.
    """
    ranks = RankGroup(group)
    verified = (
        checkpoint
        if isinstance(checkpoint, VerifiedCheckpoint)
        else open_checkpoint(checkpoint, group=group, should_cache=True)
    )
    values = read_values(verified, group=group)
    local_tensors = _match_tensors(ranks, verified, tensors, converts_dtypes=converts_dtypes)
    report: dict[str, Any] = {"fault": None, "non_finite": []}
    try:
        stored = _allocate_stored(local_tensors, verified.manifest)
        _fill_tensors(local_tensors | stored, verified, ranks)
        for name, tensor in stored.items():
            for target, part in zip(local_tensors[name].slices, tensor.slices, strict=True):
                target.values.copy_(part.values)
        report["non_finite"] = find_non_finite(local_tensors)
    except (ShardwrightError, OSError, RuntimeError) as error:
        report["fault"] = str(error)
    if verified.cache is not None:
        verified.cache.blocks.clear()
    reports = ranks.all_gather(report)
    faults = [
        f"rank {rank}: {each['fault']}"
        for rank, each in enumerate(reports)
        if each["fault"] is not None
    ]
    if faults:
        raise CheckpointError(
            f"could not be read; tensors may be partly loaded. {'; '.join(faults)}",
            field=str(verified.path),
        )
    names = sorted({name for each in reports for name in each["non_finite"]})
    if names:
        refusal = _build_non_finite_error(verified, names)
        if not allow_non_finite:
            raise refusal
        if ranks.is_first:
            logger.warning("%s: %s", refusal.field, refusal.problem)
    return values


def _build_non_finite_error(
    checkpoint: VerifiedCheckpoint, names: list[str]
) -> NonFiniteCheckpoint:
    return NonFiniteCheckpoint(
        f"NaN or infinity in {_join_shown(names)}",
        field=str(checkpoint.path),
        remedy="Remove this checkpoint, so that the one before it is used, name another one "
        "(--checkpoint), or continue to train from it (checkpoint.allow_non_finite: true)",
    )


def _join_shown(items: list[str]) -> str:
    """Join the first items; state how many are left out."""
    more = len(items) - _MAX_SHOWN_DIFFERENCES
    return "; ".join(items[:_MAX_SHOWN_DIFFERENCES]) + (f"; {more} more" if more > 0 else "")


def read_tensor(checkpoint: VerifiedCheckpoint, name: str) -> torch.Tensor:
    """Read one whole tensor from all its slices, in this process alone.

    Raises:
        CheckpointError: a file became unreadable after it was hashed.
        NonFiniteCheckpoint: the tensor contains NaN or infinity.
    """
    entry = checkpoint.manifest.tensors[name]
    tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    local_tensors = {name: describe_local_tensor(name, tensor)}
    _fill_tensors(local_tensors, checkpoint)
    if find_non_finite(local_tensors):
        raise _build_non_finite_error(checkpoint, [name])
    return tensor


def _match_tensors(
    ranks: RankGroup,
    checkpoint: VerifiedCheckpoint,
    tensors: Mapping[str, torch.Tensor | ParameterShard],
    *,
    converts_dtypes: bool,
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
        elif saved.dtype != local_tensors[name].dtype and not (
            converts_dtypes and _are_floating_point(saved.dtype, local_tensors[name].dtype)
        ):
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
        raise CheckpointError(
            f"its tensors do not match the run: {_join_shown(sorted(differences))}",
            field=str(checkpoint.path),
        )
    return local_tensors


def _are_floating_point(*names: str) -> bool:
    return all(DTYPES[name].is_floating_point for name in names)


def _allocate_stored(
    local_tensors: Mapping[str, LocalTensor], manifest: Manifest
) -> dict[str, LocalTensor]:
    """Allocate the tensors that the checkpoint has in another dtype, in host memory."""
    stored = {}
    for name, tensor in local_tensors.items():
        dtype = manifest.tensors[name].dtype
        if dtype != tensor.dtype:
            slices = tuple(
                replace(part, values=torch.empty(part.values.shape, dtype=DTYPES[dtype]))
                for part in tensor.slices
            )
            stored[name] = replace(tensor, dtype=dtype, slices=slices)
    return stored


class _OpenFiles:
    """Files of a checkpoint; each is opened and its header read at first use."""

    def __init__(self, checkpoint: VerifiedCheckpoint) -> None:
        self._folder = checkpoint.path
        self._cache = checkpoint.cache
        self._open: dict[str, tuple[ReadableFile, dict[str, HeaderEntry]]] = {}

    def __enter__(self) -> _OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for opened, _entries in self._open.values():
            opened.close()

    def open(self, file: str) -> None:
        """Open a file and read its header. Threads may open different files."""
        path = self._folder / file
        cache = None if self._cache is None else self._cache.find(file)
        with ExitStack() as opening:
            opened = opening.enter_context(cache or open_regular_file(path))
            self._open[file] = (opened, read_header(path, opened))
            opening.pop_all()  # it stays open

    def find(self, file: str, key: str) -> tuple[ReadableFile, HeaderEntry]:
        """Return the open file and the header entry of a slice."""
        if file not in self._open:
            self.open(file)
        opened, entries = self._open[file]
        if key not in entries:
            raise CheckpointError(f"{file} no longer contains {key}", field=str(self._folder))
        return opened, entries[key]


def _fill_tensors(
    local_tensors: Mapping[str, LocalTensor],
    checkpoint: VerifiedCheckpoint,
    ranks: RankGroup | None = None,
) -> None:
    """Fill all tensors; from an object store by several requests at the same time.

    Args:
        ranks: Ranks that load together and exchange what they have fetched. None: no others do.
    """
    parts = _list_parts(local_tensors, checkpoint.manifest)
    with _OpenFiles(checkpoint) as files:
        if isinstance(checkpoint.path, Path):
            for read in _plan_reads(parts, files):
                read.load()
            return
        cache = checkpoint.cache
        remote_parts = (
            exchange_parts(ranks, cache.blocks, parts, files.find)
            if ranks is not None and ranks.world_size > 1 and cache is not None
            else list(parts)
        )
        names = {part.stored_slice.file for part in remote_parts}
        with ThreadPoolExecutor(NUM_PARALLEL_READS, "checkpoint-download") as pool:
            try:
                _run_all(pool, files.open, names)
                _run_all(pool, load_group, group_reads(_plan_reads(remote_parts, files)))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _run_all(
    pool: ThreadPoolExecutor, call: Callable[[_Item], None], items: Iterable[_Item]
) -> None:
    """Call a function with each item in the pool; raise the first error."""
    for _ in pool.map(call, items):
        pass


def _list_parts(
    local_tensors: Mapping[str, LocalTensor], manifest: Manifest
) -> Iterator[StoredPart]:
    """Yield the needed part of every stored slice that local slices overlap."""
    for name, local_tensor in local_tensors.items():
        for local_slice in local_tensor.slices:
            for stored_slice in manifest.tensors[name].slices:
                shared = local_slice.box.intersect(stored_slice.box)
                if shared is not None:
                    target = view_box(local_slice.values, shared.rebase(local_slice.box))
                    yield StoredPart(stored_slice, shared.rebase(stored_slice.box), target)


def _plan_reads(parts: Iterable[StoredPart], files: _OpenFiles) -> Iterator[BoxRead]:
    for part in parts:
        file, stored = files.find(part.stored_slice.file, part.stored_slice.key)
        yield from plan_reads(file, stored, part.box, part.target)
