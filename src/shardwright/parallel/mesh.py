"""Process groups and the mesh of ranks, read off the layout's rank grid."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.errors import LayoutError
from shardwright.layout import AXES, Layout, RankGrid


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


_meshes: dict[tuple[dist.ProcessGroup | None, str, tuple[int, ...]], DeviceMesh] = {}


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh | None:
    """The mesh with the axes `layout.AXES`; None for a single rank, which needs no process group at all.

    Layouts of equal degrees share one mesh: its groups open threads and sockets that stay until the process ends.

    Raises:
        LayoutError: the layout takes another number of ranks than run.
    """
    if layout.world_size == 1:
        return None
    running = dist.get_world_size()
    if layout.world_size != running:
        raise LayoutError(f"the layout takes {layout.world_size} ranks, but {running} run", field="layout", got=str(layout))
    grid = RankGrid(layout)
    key = (dist.group.WORLD, device_type, grid.shape)
    if key not in _meshes:
        _meshes[key] = init_device_mesh(device_type, grid.shape, mesh_dim_names=AXES)
    mesh = _meshes[key]
    assert tuple(mesh.get_coordinate() or ()) == tuple(grid.coordinates(dist.get_rank()).values())
    return mesh


def sum_over(tensor: Tensor, axes: Sequence[str], mesh: DeviceMesh | None) -> Tensor:
    """`tensor` summed in place over the ranks of the named axes; itself when they hold this rank only."""
    if mesh is None:
        return tensor
    assert mesh.mesh_dim_names is not None
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    several = [axis for axis in axes if sizes[axis] > 1]
    ranks = 1
    for axis in several:
        ranks *= sizes[axis]
    if ranks == mesh.size() and ranks > 1:
        dist.all_reduce(tensor)
        return tensor
    for axis in several:
        dist.all_reduce(tensor, group=mesh.get_group(axis))
    return tensor
