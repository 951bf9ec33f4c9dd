"""Process groups of a layout, read off its rank grid."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwright.errors import LayoutError
from shardwright.layout import AXES, EXPERT_AXES, FSDP_AXES, Layout, RankGrid
from shardwright.parallel.waiting import waiting


def init_process_group(
    device_type: str,
    *,
    timeout: timedelta,
    store: dist.Store | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the other ranks: gloo for CPU tensors, NCCL for CUDA tensors as well with `device_type` cuda.

    Without `store` the environment's MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE are taken, as torchrun sets them.
    """
    cuda = device_type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        timeout=timeout,
        store=store,
        rank=rank,
        world_size=world_size,
        device_id=torch.device("cuda", torch.cuda.current_device()) if cuda else None,
    )


Ranks = tuple[int, ...]

_groups: dict[tuple[dist.ProcessGroup | None, Ranks], dist.ProcessGroup] = {}
"""Groups by the world they were made in and their ranks: each opens threads and sockets that stay until the process ends."""


class Mesh:
    """A layout's ranks as this rank sees them: where it sits, and the groups that it talks in.

    Groups are made when the mesh is, all of them by all ranks in the same order, which is what torch asks for.
    """

    def __init__(self, layout: Layout, device_type: str) -> None:
        self.layout, self.device_type = layout, device_type
        self.grid = RankGrid(layout)
        self.rank = dist.get_rank()
        self.coordinates = self.grid.coordinates(self.rank)
        for axes in _groupings(layout):
            self.join(self.grid.groups(axes))

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one on `axes` only; None where that is nobody else.

        One axis always has a group, and so have (dp_replicate, fsdp) and (dp_replicate, efsdp).
        """
        ranks = self.grid.group_of(self.rank, axes)
        return None if len(ranks) == 1 else _groups[dist.group.WORLD, ranks]

    def join(self, groups: Sequence[Ranks]) -> dist.ProcessGroup | None:
        """The one of `groups` that has this rank; None where that is nobody else. Every rank calls this with the same groups."""
        mine = None
        for ranks in groups:
            key = (dist.group.WORLD, ranks)
            if len(ranks) > 1 and key not in _groups:
                world = dist.group.WORLD if len(ranks) == dist.get_world_size() else None
                _groups[key] = world or dist.new_group(list(ranks))
            if len(ranks) > 1 and self.rank in ranks:
                mine = _groups[key]
        return mine

    def cuts(self) -> dict[dist.ProcessGroup, str]:
        """Which cut each group of this rank serves, as `waiting.CUTS` has them; a group over several cuts serves the `world`."""
        served: dict[dist.ProcessGroup, str] = {}
        for axes in _groupings(self.layout):
            group = self.group(*axes)
            if group is not None:  # ranks that two groupings share are the narrower one's, which comes first
                served.setdefault(group, _CUT_OF_AXIS[axes[0]] if len({_CUT_OF_AXIS[axis] for axis in axes}) == 1 else "world")
        return served

    def device_mesh(self, shard_axis: str) -> DeviceMesh:
        """What FSDP2 wants: ZeRO's axis (`fsdp`, or `efsdp` for experts), after `dp_replicate` where there are replicas."""
        axes = ("dp_replicate", shard_axis) if self.layout.dp_replicate > 1 else (shard_axis,)
        # A group of one rank is a group nevertheless to FSDP2.
        groups = [self.group(axis) or self.join_alone() for axis in axes]
        ranks = torch.tensor(self.grid.group_of(self.rank, axes)).view([self.layout.degree(axis) for axis in axes])
        if len(axes) == 1:
            return DeviceMesh.from_group(groups[0], self.device_type, mesh_dim_names=axes)
        return DeviceMesh.from_group(groups, self.device_type, mesh=ranks, mesh_dim_names=axes)

    def join_alone(self) -> dist.ProcessGroup:
        """A group of this rank only. Every rank calls this at the same point."""
        for rank in range(dist.get_world_size()):
            key = (dist.group.WORLD, (rank,))
            if key not in _groups:
                _groups[key] = dist.new_group([rank])
        return _groups[dist.group.WORLD, (self.rank,)]

    def sum_over(self, tensor: Tensor, axes: Sequence[str]) -> Tensor:
        """`tensor` summed in place over the ranks of the named axes; itself when they hold this rank only."""
        for group in self._fewest_groups(axes):
            with waiting(group):
                dist.all_reduce(tensor, group=group)
        return tensor

    def _fewest_groups(self, axes: Sequence[str]) -> list[dist.ProcessGroup]:
        """Groups whose sums, one after another, are the sum over `axes`."""
        several = [axis for axis in axes if self.layout.degree(axis) > 1]
        ranks = self.grid.group_of(self.rank, several)
        if len(ranks) == 1:
            return []
        if (dist.group.WORLD, ranks) in _groups:
            return [_groups[dist.group.WORLD, ranks]]
        groups = [self.group(axis) for axis in several]
        return [group for group in groups if group is not None]


_CUT_OF_AXIS = {"tp": "tensor", "cp": "context", "pp": "pipeline", "ep": "expert"} | dict.fromkeys(
    ("dp_replicate", "dp_shard", "fsdp", "efsdp"), "data"
)


def _groupings(layout: Layout) -> list[tuple[str, ...]]:
    """Axes, alone and together, that something is exchanged over."""
    singles: list[tuple[str, ...]] = [(axis,) for axis in (*AXES, "fsdp", *EXPERT_AXES) if layout.degree(axis) > 1]
    together = [("dp_replicate", "fsdp"), ("dp_replicate", "efsdp"), ("dp_replicate", *FSDP_AXES[1:]), AXES]
    return singles + together


_meshes: dict[tuple[dist.ProcessGroup | None, str, Layout], Mesh] = {}


def build_mesh(layout: Layout, device_type: str) -> Mesh | None:
    """The mesh of a layout; None for a single rank, which needs no process group at all.

    Raises:
        LayoutError: the layout takes another number of ranks than run.
    """
    if layout.world_size == 1:
        return None
    running = dist.get_world_size()
    if layout.world_size != running:
        raise LayoutError(f"the layout takes {layout.world_size} ranks, but {running} run", field="layout", got=str(layout))
    key = (dist.group.WORLD, device_type, layout)
    if key not in _meshes:
        _meshes[key] = Mesh(layout, device_type)
    return _meshes[key]


def sum_over(tensor: Tensor, axes: Sequence[str], mesh: Mesh | None) -> Tensor:
    """`tensor` summed in place over the ranks of the named axes; itself without a mesh."""
    return tensor if mesh is None else mesh.sum_over(tensor, axes)
