"""Gradient reductions that DDP and FSDP2 do not make.

They follow from the parameters' descriptors: parameters that are replicated over
tensor-parallel ranks which see different tokens or heads, key-value heads that several of these
ranks hold, tied embeddings on several pipeline stages and, where no wrapper runs, every
parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.layout import DATA_AXES, Bounds, ParameterLayout, compute_local_boxes
from shardwright.numerics import get_local_tensor
from shardwright.parallel.comm_timing import time_wait
from shardwright.parallel.mesh import Mesh

_DATA_GROUP_AXES = (*DATA_AXES, "efsdp")
_ALONE_BYTES = 1 << 20
"""Gradients of this size are reduced in place, not copied into a bucket: a bucket that is reduced
during backward passes takes memory until they end."""


@dataclass(frozen=True)
class PendingReduction:
    """Reduction of a parameter's local gradient over `group`, limited to `boxes`.

    A box is (start, length) per dimension.
    """

    name: str
    boxes: tuple[Bounds, ...]
    group: dist.ProcessGroup
    dtype: torch.dtype
    """Dtype of the sums."""
    is_over_data: bool = False
    """True if `group` has the ranks with different tokens: every rank of it runs the same stages
    in the same order."""


def list_pending_reductions(
    layouts: Mapping[str, ParameterLayout],
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    has_wrapper: bool,
    excluded_names: Collection[str] = (),
) -> list[PendingReduction]:
    """List the reductions that remain on this rank.

    Every rank calls this with the descriptors of the whole model, because it creates groups.

    Args:
        dtype: dtype of the sums.
        has_wrapper: True if a wrapper reduces over the data axes.
        excluded_names: names of parameters that the wrapper leaves out.
    """
    reductions = []
    for name, layout in layouts.items():
        boxes = compute_local_boxes(layout, mesh.layout, mesh.coordinates)
        reduced_axes = (
            (*DATA_AXES, "fsdp", "efsdp") if has_wrapper and name not in excluded_names else ()
        )
        for axes in _group_axes(
            [axis for axis in layout.reduced_axes if axis not in reduced_axes and axis != "pp"]
        ):
            group = mesh.group(*axes)
            if group is not None and boxes:
                reductions.append(
                    PendingReduction(
                        name,
                        tuple(box.local_bounds for box in boxes),
                        group,
                        dtype,
                        is_over_data=axes[0] in _DATA_GROUP_AXES,
                    )
                )
        if len(layout.pp_ranks) > 1:
            group = mesh.join_group(
                [
                    tuple(ranks[stage] for stage in layout.pp_ranks)
                    for ranks in mesh.grid.groups(["pp"])
                ]
            )
            if boxes:
                assert group is not None
                reductions.append(
                    PendingReduction(name, tuple(box.local_bounds for box in boxes), group, dtype)
                )
        for copies in _list_copy_counts(layout, mesh):
            group = mesh.join_group(mesh.grid.subgroups("tp", copies))
            shared = tuple(box.local_bounds for box in boxes if box.num_copies == copies)
            if boxes:
                assert group is not None
                # ZeRO may leave this rank none of the shared boxes; then the same is true of
                # its whole group.
                reductions.append(PendingReduction(name, shared, group, dtype))
    return reductions


def _group_axes(axes: Sequence[str]) -> list[tuple[str, ...]]:
    """Split axes into reductions: all data axes in one, each other axis in its own."""
    data = tuple(axis for axis in axes if axis in _DATA_GROUP_AXES)
    return ([data] if data else []) + [(axis,) for axis in axes if axis not in data]


def _list_copy_counts(layout: ParameterLayout, mesh: Mesh) -> list[int]:
    """Return how many neighbours share a piece, for sections with fewer pieces than ranks."""
    return sorted(
        {
            mesh.layout.degree(shard.axis) // section.num_pieces
            for shard in layout.shards
            for section in shard.sections
            if section.num_pieces < mesh.layout.degree(shard.axis)
        }
    )


def complete_gradients(
    parameters: Mapping[str, nn.Parameter], names: Iterable[str]
) -> dict[str, Tensor]:
    """Return the local gradients of trained parameters, zeros where there are none."""
    gradients = {}
    for name in names:
        parameter = parameters[name]
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:  # the other ranks of its group have a gradient
            parameter.grad = torch.zeros_like(parameter)
        gradients[name] = get_local_tensor(parameter.grad)
    return gradients


def reduce_gradients(
    reductions: Iterable[PendingReduction],
    gradients: Mapping[str, Tensor],
    *,
    bucket_size_bytes: int,
) -> None:
    """Reduce local gradients in place, group by group, in buckets.

    Every rank of a group passes the same tensors in the same order.
    """
    # A tensor may be reduced over several groups, one after another. The order is the same on
    # every rank, because descriptors come in the model's order.
    for group, dtype, parts in _group_parts(reductions, gradients):
        for bucket in _split_into_buckets(parts, bucket_size_bytes):
            _launch_all_reduce(bucket, group, dtype).wait()


def launch_reductions(
    reductions: Iterable[PendingReduction],
    gradients: Mapping[str, Tensor],
    *,
    bucket_size_bytes: int,
) -> list[LaunchedReduction]:
    """Begin to reduce local gradients; `wait` of each result puts the sums in place.

    Until then these gradients must not be read or changed. Each gradient is reduced over one group
    only. Otherwise as `reduce_gradients`.
    """
    launched = []
    for group, dtype, parts in _group_parts(reductions, gradients):
        small = [part for part in parts if not _is_reduced_alone(part)]
        buckets = [[part] for part in parts if _is_reduced_alone(part)]
        buckets += _split_into_buckets(small, bucket_size_bytes)
        launched += [_launch_all_reduce(bucket, group, dtype) for bucket in buckets]
    return launched


def _is_reduced_alone(part: Tensor) -> bool:
    return part.is_contiguous() and part.numel() * part.element_size() >= _ALONE_BYTES


def _group_parts(
    reductions: Iterable[PendingReduction], gradients: Mapping[str, Tensor]
) -> Iterator[tuple[dist.ProcessGroup, torch.dtype, list[Tensor]]]:
    """Yield each group with the dtype of its sums and the parts of gradients of one dtype."""
    by_kind: dict[tuple[dist.ProcessGroup, torch.dtype, torch.dtype], list[Tensor]] = {}
    for pending in reductions:
        gradient = gradients[pending.name]
        parts = by_kind.setdefault((pending.group, pending.dtype, gradient.dtype), [])
        parts += [narrow_to_box(gradient, box) for box in pending.boxes]
    for (group, dtype, _), parts in by_kind.items():
        yield group, dtype, parts


def narrow_to_box(tensor: Tensor, bounds: Bounds) -> Tensor:
    """Return a view of a box of a tensor."""
    for dim, (start, length) in enumerate(bounds):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def _split_into_buckets(tensors: list[Tensor], size_bytes: int) -> Iterable[list[Tensor]]:
    bucket: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        bucket.append(tensor)
        filled += tensor.numel() * tensor.element_size()
        if filled >= size_bytes:
            yield bucket
            bucket = []
            filled = 0
    if filled:
        yield bucket


@dataclass(frozen=True)
class LaunchedReduction:
    """Pending sum of tensors over a group.

    `flat` has the tensors one after another, in the dtype of the sums; None if there is one, which
    is reduced in place.
    """

    tensors: list[Tensor]
    flat: Tensor | None
    group: dist.ProcessGroup
    work: dist.Work

    def wait(self) -> None:
        """Wait for the sums, on CUDA in the stream, and put them in place."""
        with time_wait(self.group):
            self.work.wait()
        if self.flat is not None:
            sums = self.flat.split([tensor.numel() for tensor in self.tensors])
            for tensor, summed in zip(self.tensors, sums, strict=True):
                tensor.copy_(summed.view(tensor.shape))


def _launch_all_reduce(
    tensors: list[Tensor], group: dist.ProcessGroup, dtype: torch.dtype
) -> LaunchedReduction:
    flat = None
    if len(tensors) > 1 or not tensors[0].is_contiguous() or tensors[0].dtype != dtype:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(dtype)
    work = dist.all_reduce(tensors[0] if flat is None else flat, group=group, async_op=True)
    assert work is not None, "this rank belongs to the group"
    return LaunchedReduction(tensors, flat, group, work)
