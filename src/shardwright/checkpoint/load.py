"""Loading: into tensors that are there, under whatever layout they have; each rank reads only what it holds.

Nothing is parsed before its hash is right; no tensor is touched before all ranks know that the checkpoint is whole and fits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from shardwright.checkpoint.boxes import Box
from shardwright.checkpoint.disk import open_regular
from shardwright.checkpoint.exchange import Ranks
from shardwright.checkpoint.header import StoredTensor, read_header
from shardwright.checkpoint.manifest import (
    DTYPE_BYTES,
    Manifest,
    parse_manifest,
    read_manifest_text,
)
from shardwright.checkpoint.pieces import DTYPE_NAMES, HeldTensor, Part, held_tensor
from shardwright.checkpoint.place import BLOCK_BYTES, OpenFile, Place, place_of
from shardwright.checkpoint.values import RunValues, parse_values, read_values_file
from shardwright.checkpoint.verify import Refused, WholeCheckpoint, candidates, faults_of_files, faults_of_folder, share_of_files
from shardwright.errors import CheckpointError, ShardwrightError

logger = logging.getLogger(__name__)

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_SHOWN_DIFFERENCES = 20
_SHORT_RUN_BYTES = 64 * 1024
"""Runs below this are read together with what lies between them: a page or more would come with each anyway."""


def newest_checkpoint(root: str | Place, *, group: dist.ProcessGroup | None = None) -> WholeCheckpoint | None:
    """The newest whole checkpoint of a root, or None; every rank of `group` calls this and gets the same answer.

    Newest is what `latest` names; where that is damaged, the newest before it, and one logged line says what was lost. Every byte
    of the answer was hashed, each file by one rank; `load_checkpoint` takes the answer without hashing again.
    """
    ranks, root = Ranks(group), place_of(root)
    paths, refused = candidates(root) if ranks.is_first else ([], [])
    told = ranks.from_first([[path.name for path in paths], [[lost.path.name, lost.reason] for lost in refused]])
    refused = [Refused(root / name, reason) for name, reason in told[1]]
    for name in told[0]:
        path = root / name
        manifest, faults = _verified(ranks, path)
        if manifest is not None and not faults:
            found = WholeCheckpoint(path, manifest, tuple(refused))
            if refused and ranks.is_first:
                lost = "; ".join(map(str, refused))
                logger.warning("falling back from %s to %s: %s", refused[0].path.name, path.name, lost)
            return found
        refused.append(Refused.because(path, faults))
    if refused and ranks.is_first:
        logger.warning("no checkpoint of %s can be taken: %s", root, "; ".join(map(str, refused)))
    return None


def open_checkpoint(path: str | Place, *, group: dist.ProcessGroup | None = None) -> WholeCheckpoint:
    """A checkpoint by its folder, every byte checked; every rank of `group` calls this.

    Raises:
        CheckpointError: it is not whole; says what is wrong.
    """
    manifest, faults = _verified(Ranks(group), place_of(path))
    if manifest is None or faults:
        shown = "; ".join(faults[:_SHOWN_DIFFERENCES])
        raise CheckpointError(f"this checkpoint cannot be taken: {shown}", field=str(path))
    return WholeCheckpoint(place_of(path), manifest)


def _verified(ranks: Ranks, path: Place) -> tuple[Manifest | None, list[str]]:
    """A manifest as the first rank read it, and the faults that any rank found."""
    told: dict[str, Any] = {"text": "", "faults": []}
    if ranks.is_first:
        try:
            told["text"] = read_manifest_text(path).decode("utf-8", errors="strict")
            manifest = parse_manifest(told["text"].encode(), path)
            told["faults"] = faults_of_folder(path, manifest)
        except ShardwrightError as error:
            told["faults"] = [getattr(error, "problem", str(error))]
        except (OSError, UnicodeDecodeError) as error:
            told["faults"] = [str(error)]
    told = ranks.from_first(told)
    if told["faults"]:
        return None, told["faults"]
    manifest = parse_manifest(told["text"].encode(), path)
    mine = faults_of_files(path, manifest, share_of_files(manifest, ranks.rank, ranks.world_size))
    return manifest, sorted({fault for faults in ranks.gather(mine) for fault in faults})


def read_values(found: WholeCheckpoint, *, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """The JSON values of a checkpoint that was found whole: to see whether it fits before any tensor is touched.

    Every rank of `group` calls this; the first one reads.

    Raises:
        CheckpointError: they are no JSON object, or cannot be read.
    """
    ranks = Ranks(group)
    told: dict[str, Any] = {"values": {}, "fault": None}
    if ranks.is_first:
        try:
            told["values"] = read_values_file(found.path)
        except CheckpointError as error:
            got = None if error.got is None else str(error.got)
            told["fault"] = [error.problem, error.field, got, error.allowed, error.remedy]
    told = ranks.from_first(told)
    if told["fault"] is not None:
        problem, field, got, allowed, remedy = told["fault"]
        raise CheckpointError(problem, field=field, got=got, allowed=allowed, remedy=remedy)
    values: dict[str, Any] = told["values"]
    return values


def read_run_values(found: WholeCheckpoint, *, group: dist.ProcessGroup | None = None) -> RunValues:
    """Read and check the values of a checkpoint that training wrote; every rank of `group` calls this.

    Raises:
        CheckpointError: they cannot be read, or a field is not as training writes it. The same on every rank.
    """
    return parse_values(read_values(found, group=group), found.path, step=found.step)


def load_checkpoint(
    checkpoint: str | Place | WholeCheckpoint, tensors: Mapping[str, torch.Tensor | Part], *, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Fill `tensors` in place and return the values; every rank of `group` calls this.

    Args:
        checkpoint: a folder, whose every byte is hashed first, or what `newest_checkpoint` found, which was hashed already.
        tensors: by name, plain or DTensor under any layout; together the ranks must name exactly what was saved.
        group: ranks that load together; None is the default group, or this process alone.

    Raises:
        CheckpointError: damage, or a list of tensors that are missing, surplus, of another shape or dtype. Raised on every rank
            before any tensor was touched; only a file that turns unreadable after it was hashed can leave tensors half filled.
    """
    ranks = Ranks(group)
    found = checkpoint if isinstance(checkpoint, WholeCheckpoint) else open_checkpoint(checkpoint, group=group)
    values = read_values(found, group=group)
    held = _fitting(ranks, found, tensors)
    fault = None
    try:
        with torch.no_grad(), _Files(found.path) as files:
            for name, tensor in held.items():
                _fill(tensor, name, found.manifest, files)
    except (ShardwrightError, OSError, RuntimeError) as error:
        fault = str(error)
    faults = [f"rank {rank}: {fault}" for rank, fault in enumerate(ranks.gather(fault)) if fault is not None]
    if faults:
        raise CheckpointError(f"could not be read; tensors may be half filled. {'; '.join(faults)}", field=str(found.path))
    return values


def read_tensor(found: WholeCheckpoint, name: str) -> torch.Tensor:
    """One whole tensor, joined from its slices, in this process alone.

    Raises:
        CheckpointError: a file that turned unreadable after it was hashed.
    """
    entry = found.manifest.tensors[name]
    tensor = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
    with _Files(found.path) as files:
        _fill(held_tensor(name, tensor), name, found.manifest, files)
    return tensor


def _fitting(ranks: Ranks, found: WholeCheckpoint, tensors: Mapping[str, torch.Tensor | Part]) -> dict[str, HeldTensor]:
    """What this rank holds, once all ranks' names, shapes and dtypes are found to be those of the checkpoint."""
    held: dict[str, HeldTensor] = {}
    problems: list[str] = []
    for name, tensor in tensors.items():
        try:
            held[name] = held_tensor(name, tensor)
        except ShardwrightError as error:
            problems.append(str(error))
            continue
        saved = found.manifest.tensors.get(name)
        if saved is None:
            problems.append(f"missing {name}: wanted, not in the checkpoint")
        elif saved.shape != held[name].shape:
            problems.append(f"{name} has shape {saved.shape} in the checkpoint, {held[name].shape} here")
        elif saved.dtype != held[name].dtype:
            problems.append(f"{name} is {saved.dtype} in the checkpoint, {held[name].dtype} here")
    everyone = ranks.gather({"names": sorted(tensors), "problems": problems})
    differences = {problem for told in everyone for problem in told["problems"]}
    wanted = {name for told in everyone for name in told["names"]}
    differences |= {f"surplus {name}: in the checkpoint, wanted by no rank" for name in set(found.manifest.tensors) - wanted}
    if differences:
        shown = sorted(differences)[:_SHOWN_DIFFERENCES]
        rest = f"; {len(differences) - len(shown)} more" if len(differences) > len(shown) else ""
        raise CheckpointError(f"its tensors do not fit the run: {'; '.join(shown)}{rest}", field=str(found.path))
    return held


class _Files:
    """Files of a checkpoint, opened and their headers read when first needed."""

    def __init__(self, folder: Place) -> None:
        self._folder = folder
        self._open: dict[str, tuple[OpenFile, dict[str, StoredTensor]]] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for opened, _entries in self._open.values():
            opened.close()

    def find(self, file: str, key: str) -> tuple[OpenFile, StoredTensor]:
        """The open file and the place in it of a slice."""
        if file not in self._open:
            entries = read_header(self._folder / file)
            self._open[file] = (open_regular(self._folder / file), entries)
        opened, entries = self._open[file]
        if key not in entries:
            raise CheckpointError(f"{file} no longer holds {key}", field=str(self._folder))
        return opened, entries[key]


def _fill(held: HeldTensor, name: str, manifest: Manifest, files: _Files) -> None:
    """Copy into each local piece what every slice has of it."""
    for piece in held.pieces:
        for part in manifest.tensors[name].slices:
            shared = piece.box.overlap(part.box)
            if shared is not None:
                file, stored = files.find(part.file, part.key)
                target = _narrowed(piece.values, shared.within(piece.box))
                _read_box(file, stored, part.box.lengths, shared.within(part.box), target)


def _narrowed(values: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
        values = values.narrow(dim, start, length)
    return values


def _read_box(file: OpenFile, stored: StoredTensor, shape: tuple[int, ...], box: Box, target: torch.Tensor) -> None:
    """Read part `box` of a stored slice of `shape` into `target`.

    One run of bytes goes straight into host memory. Otherwise the span from the first to the last wanted byte is read, if it fits a
    block and the runs in it are too short to be worth a system call each, and picked by strides; else the box is halved.
    """
    item = DTYPE_BYTES[stored.dtype]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    span_bytes = item * (1 + sum((length - 1) * stride for length, stride in zip(box.lengths, strides, strict=True)))
    is_run = span_bytes == item * box.num_elements
    position = stored.start + item * start
    if is_run and target.device.type == "cpu" and target.is_contiguous():
        _read_into(file, position, target.view(-1).view(torch.uint8))
    elif span_bytes <= BLOCK_BYTES and (is_run or item * _run_elements(shape, box) < _SHORT_RUN_BYTES):
        staged = torch.empty(span_bytes, dtype=torch.uint8)
        _read_into(file, position, staged)
        target.copy_(staged.view(_DTYPES[stored.dtype]).as_strided(box.lengths, strides))
    else:
        dim = next(dim for dim, length in enumerate(box.lengths) if length > 1)
        half = box.lengths[dim] // 2
        for begin, length in ((0, half), (half, box.lengths[dim] - half)):
            offsets = tuple(offset + begin * (d == dim) for d, offset in enumerate(box.offsets))
            lengths = tuple(length if d == dim else old for d, old in enumerate(box.lengths))
            _read_box(file, stored, shape, Box(offsets, lengths), target.narrow(dim, begin, length))


def _run_elements(shape: tuple[int, ...], box: Box) -> int:
    """Elements of the box that lie one after the other in the file."""
    run = 1
    for length, size in zip(reversed(box.lengths), reversed(shape), strict=True):
        run *= length
        if length != size:
            break
    return run


def _read_into(file: OpenFile, position: int, data_N: torch.Tensor) -> None:
    """Fill a host tensor of bytes from a file."""
    view = data_N.numpy().data
    while view:
        count = file.read_into(position, view)
        if count == 0:
            raise CheckpointError("a file ended early: it was changed after it was hashed")
        view, position = view[count:], position + count
