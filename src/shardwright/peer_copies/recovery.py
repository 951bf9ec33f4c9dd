"""Loading of a state from the copies in the ranks' memory, under any layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist

from shardwright.checkpoint.box_reading import DTYPES, plan_reads, view_box
from shardwright.checkpoint.boxes import Box
from shardwright.checkpoint.header import HeaderEntry
from shardwright.checkpoint.local_tensors import (
    HostCopy,
    LocalTensor,
    ParameterShard,
    describe_local_tensor,
)
from shardwright.checkpoint.manifest import DTYPE_BYTES
from shardwright.checkpoint.rank_group import RankGroup
from shardwright.checkpoint.storage_path import ReadableFile
from shardwright.checkpoint.tensor_saving import merge_into, merge_values
from shardwright.errors import CheckpointError
from shardwright.grouping import group_by_size
from shardwright.peer_copies.memory import CopiedBox, CopyId, PeerMemory, StateCopy

_ROUND_BYTES = 16 * 1024**2
"""Bytes that a rank sends and receives in one round; a larger box is sent in parts."""
_ALIGNMENT_BYTES = 16
_MAX_SHOWN_DIFFERENCES = 20


@dataclass(frozen=True)
class CopySearch:
    """Result of the search for copies; the same on all ranks."""

    found: CopyId | None
    """Newest step that the copies of all ranks together have completely."""
    fault: str
    """Reason why none was found; empty otherwise."""
    finished_step: int
    """Newest step that any process has finished."""


def find_copies(ranks: RankGroup, memory: PeerMemory) -> CopySearch:
    """Find the newest step of which some rank has a copy of every rank's state.

    Collective. Starts a new generation of copies in `memory`.
    """
    reports = ranks.all_gather(
        {
            "generation": memory.generation,
            "first_valid": memory.first_valid_generation,
            "finished_step": memory.finished_step,
            "copies": [
                [copy.copy_id.generation, copy.copy_id.step, copy.world_size, copy.owner]
                for copy in memory.copies
            ],
        }
    )
    memory.first_valid_generation = max(report["first_valid"] for report in reports)
    memory.generation = 1 + max(report["generation"] for report in reports)
    memory.finished_step = max(report["finished_step"] for report in reports)
    owners: dict[CopyId, set[int]] = {}
    sizes: dict[CopyId, int] = {}
    for report in reports:
        for generation, step, world_size, owner in report["copies"]:
            copy_id = CopyId(generation, step)
            if generation >= memory.first_valid_generation:
                sizes[copy_id] = world_size
                owners.setdefault(copy_id, set()).add(owner)
    fault = "no rank has a complete copy"
    for copy_id in sorted(owners, reverse=True):
        missing = [rank for rank in range(sizes[copy_id]) if rank not in owners[copy_id]]
        if not missing:
            memory.keep_copies(copy_id)
            return CopySearch(copy_id, "", memory.finished_step)
        if copy_id == max(owners):
            names = ", ".join(map(str, missing))
            fault = (
                f"the state of rank{'s' if len(missing) > 1 else ''} {names} after step "
                f"{copy_id.step} was lost with the process that kept its copy"
            )
    return CopySearch(None, fault, memory.finished_step)


def _select_copies(memory: PeerMemory, copy_id: CopyId) -> list[StateCopy]:
    """Select the copies of one step in this process; no two have the same owner."""
    return [copy for copy in memory.copies if copy.copy_id == copy_id]


def read_copied_values(ranks: RankGroup, memory: PeerMemory, copy_id: CopyId) -> dict[str, Any]:
    """Return the checkpoint values of this state: rank 0's and the merged values.

    Collective; the same on all ranks.
    """
    merged: dict[str, Any] = {}
    first = None
    for copy in _select_copies(memory, copy_id):
        merge_into(merged, copy.values["merged"], copy.owner, "values")
        if copy.owner == 0:
            first = copy.values["values"]
    values = next(values for values in ranks.all_gather(first) if values is not None)
    return {**values, **merge_values(ranks, merged)}


class _CopyFile(ReadableFile):
    """Bytes of a copied tensor as a file, which `plan_reads` takes."""

    def __init__(self, copy: HostCopy) -> None:
        self.size_bytes = copy.nbytes
        self._pieces = copy.pieces

    def read_into(self, position: int, data: memoryview) -> int:
        for piece in self._pieces:
            if position < piece.numel():
                count = min(len(data), piece.numel() - position)
                data[:count] = piece[position : position + count].numpy().data
                return count
            position -= piece.numel()
        return 0

    def close(self) -> None:
        """Do nothing: the memory belongs to the copy."""


@dataclass(frozen=True)
class _Delivery:
    """Part of a tensor that one rank delivers to another, or to itself."""

    source_rank: int
    target_rank: int
    source: CopiedBox
    target_box: Box
    """Box of the target rank's tensor that contains the part."""
    shared: Box


@dataclass
class _Requests:
    """Boxes that each rank needs, and that the copies have; the same on all ranks."""

    needed: list[list[CopiedBox]]
    available: dict[str, dict[CopiedBox, list[int]]] = field(default_factory=dict)
    """Boxes by name, with the ranks that have them."""


def load_copies(
    group: dist.ProcessGroup | None,
    memory: PeerMemory,
    copy_id: CopyId,
    tensors: Mapping[str, torch.Tensor | ParameterShard],
) -> None:
    """Load `tensors`, of any layout, in place from the copies. Collective.

    Raises:
        CheckpointError: Tensors are missing, surplus or of another shape or dtype. Raised on every
            rank before any tensor changes.
    """
    ranks = RankGroup(group)
    local_tensors = {name: describe_local_tensor(name, tensor) for name, tensor in tensors.items()}
    parts: dict[CopiedBox, HostCopy] = {}
    for copy in _select_copies(memory, copy_id):
        parts.update(copy.parts)
    requests = _gather_requests(ranks, local_tensors, list(parts))
    deliveries = _plan_deliveries(requests)
    for delivery in deliveries:
        if delivery.source_rank == delivery.target_rank == ranks.rank:
            target = _view_target(local_tensors, delivery, delivery.shared)
            _read_part(parts[delivery.source], delivery, delivery.shared, target)
    for messages in _plan_rounds(deliveries):
        payloads = [
            _pack(messages.get((ranks.rank, target_rank), []), parts)
            for target_rank in range(ranks.world_size)
        ]
        for source_rank, buffer in enumerate(ranks.exchange(payloads)):
            message = messages.get((source_rank, ranks.rank), [])
            for (delivery, box), values in zip(message, _unpack(message, buffer), strict=True):
                _view_target(local_tensors, delivery, box).copy_(values)


def _gather_requests(
    ranks: RankGroup, local_tensors: Mapping[str, LocalTensor], parts: Sequence[CopiedBox]
) -> _Requests:
    """Gather the pieces that every rank needs and has."""
    needed = [
        CopiedBox(name, tensor.dtype, tensor.shape, part.box)
        for name, tensor in local_tensors.items()
        for part in tensor.slices
    ]
    reports = ranks.all_gather(
        [[box.to_json() for box in needed], [box.to_json() for box in parts]]
    )
    requests = _Requests([[CopiedBox.from_json(box) for box in report[0]] for report in reports])
    for rank, report in enumerate(reports):
        for fields in report[1]:
            box = CopiedBox.from_json(fields)
            requests.available.setdefault(box.name, {}).setdefault(box, []).append(rank)
    return requests


def _plan_deliveries(requests: _Requests) -> list[_Delivery]:
    """Choose for every needed box the parts that fill it; the same on all ranks.

    Raises:
        CheckpointError: The copies do not match the tensors.
    """
    deliveries = []
    problems = set()
    loads: dict[int, int] = {}
    for target_rank, boxes in enumerate(requests.needed):
        for needed in boxes:
            filled = 0
            available = requests.available.get(needed.name, {})
            # Of the same layout the box itself: ranks x boxes of a tensor would be many.
            candidates = {needed: available[needed]} if needed in available else available
            for source, holders in candidates.items():
                if (source.dtype, source.shape) != (needed.dtype, needed.shape):
                    problems.add(
                        f"{needed.name} is {source.dtype} {source.shape} in the copies, "
                        f"{needed.dtype} {needed.shape} here"
                    )
                    continue
                shared = needed.box.intersect(source.box)
                if shared is None:
                    continue
                filled += shared.num_elements
                source_rank = min(
                    holders, key=lambda rank: (rank != target_rank, loads.get(rank, 0), rank)
                )
                if source_rank != target_rank:
                    size = DTYPE_BYTES[source.dtype] * shared.num_elements
                    loads[source_rank] = loads.get(source_rank, 0) + size
                deliveries.append(_Delivery(source_rank, target_rank, source, needed.box, shared))
            if filled != needed.box.num_elements:
                problems.add(
                    f"the copies have {filled} of {needed.box.num_elements} elements of "
                    f"{needed.name}{needed.box}"
                )
    known = {box.name for boxes in requests.needed for box in boxes}
    problems |= {f"surplus {name}: on no rank" for name in requests.available if name not in known}
    if problems:
        listed = sorted(problems)
        more = len(listed) - _MAX_SHOWN_DIFFERENCES
        raise CheckpointError(
            "the copies in memory do not match the run: "
            + "; ".join(listed[:_MAX_SHOWN_DIFFERENCES])
            + (f"; {more} more" if more > 0 else ""),
            field="elastic.peer_copies",
        )
    return deliveries


_Message = list[tuple[_Delivery, Box]]
"""Parts that one rank sends to another in one message."""


def _plan_rounds(deliveries: Sequence[_Delivery]) -> Iterable[dict[tuple[int, int], _Message]]:
    """Return the messages of each round by source and target rank, at most one for each pair."""
    remote = [each for each in deliveries if each.source_rank != each.target_rank]
    pairs = {(each.source_rank, each.target_rank) for each in remote}
    num_partners = max(Counter(chain.from_iterable(pairs)).values(), default=1)
    limit_bytes = _ROUND_BYTES // num_partners
    parts: dict[tuple[int, int], _Message] = {}
    for each in remote:
        boxes = _split_box(each.shared, DTYPE_BYTES[each.source.dtype], limit_bytes)
        message = parts.setdefault((each.source_rank, each.target_rank), [])
        message.extend((each, box) for box in boxes)
    rounds: dict[int, dict[tuple[int, int], _Message]] = {}
    for pair, message in parts.items():
        sizes = [_count_aligned_bytes(*part) for part in message]
        for number, group in enumerate(group_by_size(message, sizes, limit_bytes)):
            rounds.setdefault(number, {})[pair] = group
    return rounds.values()


def _split_box(box: Box, item_bytes: int, limit_bytes: int) -> Iterator[Box]:
    """Yield halves of a box until each fits a message."""
    if item_bytes * box.num_elements <= limit_bytes:
        yield box
        return
    for half in box.halve():
        yield from _split_box(half, item_bytes, limit_bytes)


def _count_aligned_bytes(delivery: _Delivery, box: Box) -> int:
    size = DTYPE_BYTES[delivery.source.dtype] * box.num_elements
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _locate_parts(message: _Message) -> list[int]:
    """Return the first byte of each part in a message, and the number of bytes of all."""
    return list(accumulate((_count_aligned_bytes(*part) for part in message), initial=0))


def _unpack(message: _Message, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the parts of a message as views of its buffer."""
    for (delivery, box), start in zip(message, _locate_parts(message), strict=False):
        size = DTYPE_BYTES[delivery.source.dtype] * box.num_elements
        dtype = DTYPES[delivery.source.dtype]
        yield buffer[start : start + size].view(dtype).view(box.lengths)


def _pack(message: _Message, parts: Mapping[CopiedBox, HostCopy]) -> torch.Tensor:
    """Return a message with the values of its parts."""
    buffer = torch.zeros(_locate_parts(message)[-1], dtype=torch.uint8)
    for (delivery, box), values in zip(message, _unpack(message, buffer), strict=True):
        _read_part(parts[delivery.source], delivery, box, values)
    return buffer


def _read_part(copy: HostCopy, delivery: _Delivery, box: Box, target: torch.Tensor) -> None:
    """Copy `box` of a delivery's tensor from a copy into `target`."""
    source = delivery.source
    entry = HeaderEntry(source.dtype, source.box.lengths, 0, copy.nbytes)
    part = box.rebase(source.box)
    for read in plan_reads(_CopyFile(copy), entry, part, target):
        read.load()


def _view_target(
    local_tensors: Mapping[str, LocalTensor], delivery: _Delivery, box: Box
) -> torch.Tensor:
    """Return the view of this rank's tensor in `box`."""
    local = next(
        part
        for part in local_tensors[delivery.source.name].slices
        if part.box == delivery.target_box
    )
    return view_box(local.values, box.rebase(delivery.target_box))
