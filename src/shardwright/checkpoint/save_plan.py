"""Plan of a save: the tensors of all ranks, and the rank that writes each box.

Every rank announces its boxes. A box on several ranks is written by the one with the fewest
bytes assigned so far. All ranks compute the same assignment from the same announcements. Why
not DCP's planners: docs/decisions/0020-checkpoint-format.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwright.checkpoint.boxes import Box, build_full_box, find_cover_fault
from shardwright.checkpoint.local_tensors import (
    HostCopy,
    LocalTensor,
    ParameterShard,
    describe_local_tensor,
)
from shardwright.checkpoint.manifest import (
    DTYPE_BYTES,
    StoredSlice,
    TensorEntry,
    encode_values,
    name_shard_file,
)
from shardwright.checkpoint.rank_group import RankGroup
from shardwright.errors import SaveFailed, ShardwrightError


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
    local_writes: Sequence[tuple[str, str, Box, torch.Tensor | HostCopy]]
    digest: str
    """SHA-256 of this rank's announcement; if no rank's changes, the assignment is reused."""
    tensor_versions: tuple[int, ...] = ()
    """Version counters of the tensors to copy, which copying must not change."""
    offloaded_names: frozenset[str] = frozenset()
    """Tensors that are written from where they are, without a copy."""
    fault: str | None = None
    """Reason why this rank cannot write; all ranks learn it before anything is published."""

    def list_tensors(self) -> list[torch.Tensor]:
        """List the tensors of `local_writes` that are to be copied."""
        return [
            values
            for name, *_, values in self.local_writes
            if isinstance(values, torch.Tensor) and name not in self.offloaded_names
        ]

    def copy_tensors(self, copy: Callable[[Sequence[torch.Tensor]], list[HostCopy]]) -> SavePlan:
        """Return a plan that writes copies, so that the originals may change."""
        originals = self.list_tensors()
        try:
            copies = copy(originals)
        except (RuntimeError, MemoryError) as error:
            return replace(
                self,
                local_writes=[],
                fault=f"not enough host memory for the copy: {describe_error(error)}",
            )
        if _read_versions(originals) != self.tensor_versions:
            return replace(self, local_writes=[], fault="a tensor changed while it was copied")
        remaining = iter(copies)
        return replace(
            self,
            local_writes=[
                item if item[0] in self.offloaded_names else (*item[:3], next(remaining))
                for item in self.local_writes
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
    plan = SavePlan(
        step,
        values,
        merged_values or {},
        entries,
        takers,
        writing,
        digest,
        offloaded_names=frozenset(
            name for name, tensor in local_tensors.items() if tensor.is_offloaded
        ),
    )
    return replace(plan, tensor_versions=_read_versions(plan.list_tensors()))


def _read_versions(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return torch's counts of in-place changes; 0 for inference tensors, which have none."""
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)


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
    require_no_faults([report[1] for report in reports], "nothing was written")
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
                name_shard_file(takers[name, box]),
                name if box == build_full_box(shape) else f"{name}{box}",
                box,
            )
            for box in sorted(by_box)
        ]
        entries[name] = TensorEntry(dtype, shape, tuple(slices))
    return entries, takers


def describe_error(error: BaseException) -> str:
    """Describe an exception in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    return str(error) or type(error).__name__


def require_no_faults(faults: list[str | None], consequence: str) -> None:
    """Raise the same SaveFailed on every rank if any rank has a fault."""
    messages = [f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault is not None]
    if messages:
        raise SaveFailed(f"the checkpoint could not be saved; {consequence}. {'; '.join(messages)}")
