"""Sums of gradients that the wrappers (DDP, FSDP2) do not make: read off the descriptors, made after the last backward pass.

They are those of parameters that are whole on tensor-parallel ranks which see different tokens or heads, of key-value heads that
several of these ranks hold, of tied embeddings on several pipeline stages, and, where no wrapper runs at all, of everything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.layout import DATA_AXES, Bounds, ParameterLayout, held
from shardwright.parallel.mesh import Mesh
from shardwright.parallel.waiting import waiting


@dataclass(frozen=True)
class PendingSum:
    """`boxes` (start, length per dimension) of a parameter's local gradient are summed over `group`."""

    name: str
    boxes: tuple[Bounds, ...]
    group: dist.ProcessGroup


def pending_sums(
    layouts: Mapping[str, ParameterLayout], mesh: Mesh, *, wrapped: bool, apart: Collection[str] = ()
) -> list[PendingSum]:
    """What is left to sum on this rank. Every rank calls this with the descriptors of the whole model: it makes groups.

    Args:
        wrapped: a wrapper sums over the data axes,
        apart: but for these parameters.
    """
    sums = []
    for name, layout in layouts.items():
        mine = held(layout, mesh.layout, mesh.coordinates)
        done = (*DATA_AXES, "fsdp", "efsdp") if wrapped and name not in apart else ()
        for axes in _together([axis for axis in layout.sum_axes if axis not in done and axis != "pp"]):
            group = mesh.group(*axes)
            if group is not None and mine:
                sums.append(PendingSum(name, tuple(box.local for box in mine), group))
        if len(layout.stages) > 1:
            group = mesh.join([tuple(ranks[stage] for stage in layout.stages) for ranks in mesh.grid.groups(["pp"])])
            if mine:
                assert group is not None
                sums.append(PendingSum(name, tuple(box.local for box in mine), group))
        for copies in _copies(layout, mesh):
            group = mesh.join(mesh.grid.parts("tp", copies))
            shared = tuple(box.local for box in mine if box.copies == copies)
            if mine:
                assert group is not None
                # Boxes that ZeRO leaves this rank may be none of the shared ones; its neighbours in the group agree.
                sums.append(PendingSum(name, shared, group))
    return sums


def _together(axes: Sequence[str]) -> list[tuple[str, ...]]:
    """Data axes in one sum, others each in its own."""
    data = tuple(axis for axis in axes if axis in (*DATA_AXES, "efsdp"))
    return ([data] if data else []) + [(axis,) for axis in axes if axis not in data]


def _copies(layout: ParameterLayout, mesh: Mesh) -> list[int]:
    """How many neighbours share a piece, for the sections with fewer pieces than ranks."""
    return sorted(
        {
            mesh.layout.degree(shard.axis) // section.pieces
            for shard in layout.shards
            for section in shard.sections
            if section.pieces < mesh.layout.degree(shard.axis)
        }
    )


def make_sums(sums: Iterable[PendingSum], gradients: Mapping[str, Tensor], *, bucket_size_bytes: int) -> None:
    """Sum local gradients in place, group by group, in buckets. Every rank of a group has the same tensors in the same order."""
    by_kind: dict[tuple[dist.ProcessGroup, torch.dtype], list[Tensor]] = {}
    for pending in sums:
        gradient = gradients[pending.name]
        parts = by_kind.setdefault((pending.group, gradient.dtype), [])
        parts += [narrow(gradient, box) for box in pending.boxes]
    # Sums over one group must be done before those over another begin, where a tensor is in both; they run in the same order
    # on every rank, because descriptors come in the model's order.
    for (group, _), parts in by_kind.items():
        for bucket in _buckets(parts, bucket_size_bytes):
            _sum_bucket(bucket, group)


def narrow(tensor: Tensor, bounds: Bounds) -> Tensor:
    """A view of a box of a tensor."""
    for dim, (start, length) in enumerate(bounds):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _buckets(tensors: list[Tensor], size_bytes: int) -> Iterable[list[Tensor]]:
    bucket: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        bucket.append(tensor)
        filled += tensor.numel() * tensor.element_size()
        if filled >= size_bytes:
            yield bucket
            bucket, filled = [], 0
    if filled:
        yield bucket


def _sum_bucket(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    if len(tensors) == 1 and tensors[0].is_contiguous():
        with waiting(group):
            dist.all_reduce(tensors[0], group=group)
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    with waiting(group):
        dist.all_reduce(flat, group=group)
    for tensor, summed in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(summed.view(tensor.shape))
