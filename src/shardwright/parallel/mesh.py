"""Process groups of a layout, derived from its rank grid.

On CUDA every group has one backend, NCCL, and all groups of an axis are made in one call
(`dist.split_group`). One group of all ranks, gloo, takes CPU tensors (`get_host_group`). On the CPU
every group is gloo. docs/decisions/0064-one-backend-per-group.md has the counts.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwright.errors import LayoutError, RankFailed
from shardwright.layout import AXES, EXPERT_AXES, FSDP_AXES, Layout, RankGrid
from shardwright.parallel.comm_timing import time_wait


@dataclass(frozen=True)
class _World:
    """Set-up of the default group by `init_process_group`."""

    timeout: timedelta
    is_nccl: bool
    host_group: dist.ProcessGroup | None
    """gloo group of all ranks; None if the default group is gloo."""


_worlds: dict[dist.ProcessGroup | None, _World] = {}
_aborted = threading.Event()
"""Set once `abort_nccl_groups` aborts the groups of the current generation."""
_ABORTED = "NCCL communicator was aborted"
"""Torch's words, by which the launcher recognises the loss of another rank."""


def init_process_group(
    device_type: str,
    *,
    timeout: timedelta,
    store: dist.Store | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the other ranks: gloo on the CPU; on CUDA NCCL, and gloo for CPU tensors.

    Without `store`, the environment variables MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE are
    used, as torchrun sets them. On CUDA, CPU tensors go through `get_host_group` only.
    """
    cuda = device_type == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        timeout=timeout,
        store=store,
        rank=rank,
        world_size=world_size,
        # NCCL connects at once, which `split_group` requires.
        device_id=torch.device("cuda", torch.cuda.current_device()) if cuda else None,
    )
    # "cpu:gloo,cuda:nccl" would be one group, but its subgroups would have both backends too.
    host_group = dist.new_group(backend="gloo", timeout=timeout) if cuda else None
    assert host_group is None or isinstance(host_group, dist.ProcessGroup)  # every rank is in it
    _worlds[dist.group.WORLD] = _World(timeout, cuda, host_group)


def abort_nccl_groups() -> None:
    """Abort the communication of all NCCL groups, from any thread, so that no rank waits in one.

    Does nothing on gloo, whose operations fail by themselves once a peer is gone.
    """
    world = _worlds.get(dist.group.WORLD)
    if world is None or not world.is_nccl or not dist.is_initialized():
        return
    _aborted.set()
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort is not None:
        abort()


def check_nccl_groups() -> None:
    """Raise an error if an NCCL operation has failed, so that its results are incomplete.

    An operation on the device cannot raise one: when it is aborted, the host continues with the
    unfinished tensors. Call this once the device has been waited for, before results are used.

    Raises:
        RankFailed: An operation timed out or lost a peer, or the groups were aborted.
    """
    if _aborted.is_set():
        raise RankFailed(f"{_ABORTED}: a rank is lost")
    world = _worlds.get(dist.group.WORLD)
    if world is None or not world.is_nccl:
        return
    default = dist.group.WORLD
    groups: set[Any] = {default, *(group for key, group in _groups.items() if key[0] is default)}
    for group in groups - {dist.GroupMember.NON_GROUP_MEMBER}:
        error = group._get_backend(torch.device("cuda")).get_error()
        if error.name != "SUCCESS":
            raise RankFailed(f"{_ABORTED}: {error.name} in the group {group.group_desc}")


def abandon_process_groups() -> None:
    """Leave all process groups without waiting for their ranks; others can be joined then."""
    abort_nccl_groups()
    _meshes.clear()
    _groups.clear()
    _worlds.clear()
    _aborted.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def wait_for_gloo_threads() -> None:
    """Wait until gloo's threads have left all operations so far. Collective; only gloo waits.

    A thread completes an operation's future, for which DDP waits, before it records the end of the
    operation for a profiler. gloo's barrier waits for both.
    """
    if not dist.is_initialized():
        return
    default = dist.group.WORLD
    # In the order in which all ranks created them.
    groups = [default, *(group for key, group in _groups.items() if key[0] is default)]
    for group in dict.fromkeys(groups):
        if group is not dist.GroupMember.NON_GROUP_MEMBER and dist.get_backend(group) == "gloo":
            dist.barrier(group)


def get_host_group() -> dist.ProcessGroup | None:
    """Return the group of all ranks for CPU tensors; None, the default group, on the CPU."""
    world = _worlds.get(dist.group.WORLD)
    return None if world is None else world.host_group


RankTuple = tuple[int, ...]

_groups: dict[tuple[dist.ProcessGroup | None, RankTuple, int], Any] = {}
"""Groups by world, ranks and copy, with torch's placeholder for those without this rank. Each
opens threads and sockets that exist until the process ends.
"""


class Mesh:
    """A layout's ranks, this rank's coordinates and its process groups.

    All ranks create all groups in the same order when the mesh is built, as PyTorch requires.
    """

    def __init__(self, layout: Layout, device_type: str) -> None:
        self.layout = layout
        self.device_type = device_type
        self.grid = RankGrid(layout)
        self.rank = dist.get_rank()
        self.coordinates = self.grid.coordinates(self.rank)
        for axes in _list_axis_sets(layout):
            self.join_group(self.grid.groups(axes), "+".join(axes))

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """Return the ranks that differ from this one on `axes` only; None if it is alone.

        Groups exist for every single axis and for (dp_replicate, fsdp) and (dp_replicate,
        efsdp).
        """
        ranks = self.grid.group_of(self.rank, axes)
        return None if len(ranks) == 1 else _groups[dist.group.WORLD, ranks, 0]

    def join_group(
        self, groups: Sequence[RankTuple], description: str | None = None, *, copy: int = 0
    ) -> dist.ProcessGroup | None:
        """Create `groups` and return the one with this rank; None if that has no other rank.

        Every rank calls this with the same groups. On NCCL, groups that share no rank are created
        in one call.

        Args:
            groups: Ranks of each group.
            description: Name of the groups in NCCL's flight recorder.
            copy: Number of a further group of the same ranks, whose operations do not queue behind
                those of the others.
        """
        several = [ranks for ranks in groups if len(ranks) > 1]
        self._create_missing(several, description, copy)
        own = [ranks for ranks in several if self.rank in ranks]
        return _groups[dist.group.WORLD, own[-1], copy] if own else None

    def _create_missing(
        self, groups: Sequence[RankTuple], description: str | None, copy: int = 0
    ) -> None:
        """Create those of `groups` that do not exist; all ranks know the same ones."""
        world = _worlds.get(dist.group.WORLD)
        num_ranks = dist.get_world_size()
        missing = []
        for ranks in dict.fromkeys(groups):
            if (dist.group.WORLD, ranks, copy) not in _groups:
                if len(ranks) == num_ranks > 1 and copy == 0:
                    _groups[dist.group.WORLD, ranks, copy] = dist.group.WORLD
                else:
                    missing.append(ranks)
        if world is None or not world.is_nccl:
            for ranks in missing:
                _groups[dist.group.WORLD, ranks, copy] = dist.new_group(
                    list(ranks), timeout=None if world is None else world.timeout
                )
            return
        for disjoint in _collect_disjoint(missing):
            # A rank in none of them gets a group of its own: torch names a group after the
            # number of groups before it, so that all ranks need the same number of groups.
            members = {rank for ranks in disjoint for rank in ranks}
            alone = [(rank,) for rank in range(num_ranks) if rank not in members]
            group = dist.split_group(
                split_ranks=[list(ranks) for ranks in (*disjoint, *alone)],
                timeout=world.timeout,  # not NCCL's default of ten minutes
                group_desc=description,
            )
            for ranks in disjoint:
                _groups[dist.group.WORLD, ranks, copy] = (
                    group if self.rank in ranks else dist.GroupMember.NON_GROUP_MEMBER
                )

    def map_groups_to_parallelisms(self) -> dict[dist.ProcessGroup, str]:
        """Map each group of this rank to its parallelism, one of `comm_timing.PARALLELISMS`.

        A group over several kinds of parallelism is mapped to `world`.
        """
        parallelism_of_group: dict[dist.ProcessGroup, str] = {}
        for axes in _list_axis_sets(self.layout):
            group = self.group(*axes)
            # Of two sets of axes with the same ranks the narrower one comes first.
            if group is not None:
                parallelism_of_group.setdefault(
                    group,
                    _PARALLELISM_OF_AXIS[axes[0]]
                    if len({_PARALLELISM_OF_AXIS[axis] for axis in axes}) == 1
                    else "world",
                )
        return parallelism_of_group

    def device_mesh(self, shard_axis: str) -> DeviceMesh:
        """Build the mesh for FSDP2: ZeRO's axis, after `dp_replicate` if there are replicas.

        ZeRO's axis is `fsdp`, or `efsdp` for experts.
        """
        axes = ("dp_replicate", shard_axis) if self.layout.dp_replicate > 1 else (shard_axis,)
        # FSDP2 needs a process group for an axis of one rank too.
        groups = [self.group(axis) or self.join_single_group() for axis in axes]
        ranks = torch.tensor(self.grid.group_of(self.rank, axes)).view(
            [self.layout.degree(axis) for axis in axes]
        )
        if len(axes) == 1:
            return DeviceMesh.from_group(groups[0], self.device_type, mesh_dim_names=axes)
        return DeviceMesh.from_group(groups, self.device_type, mesh=ranks, mesh_dim_names=axes)

    def join_single_group(self) -> dist.ProcessGroup:
        """Return a group of this rank only. Every rank calls this at the same point."""
        self._create_missing([(rank,) for rank in range(dist.get_world_size())], "single")
        return _groups[dist.group.WORLD, (self.rank,), 0]

    def sum_over(self, tensor: Tensor, axes: Sequence[str]) -> Tensor:
        """Sum `tensor` in place over the ranks of the named axes."""
        return self._reduce_over(tensor, axes, dist.ReduceOp.SUM)

    def maximise_over(self, tensor: Tensor, axes: Sequence[str]) -> Tensor:
        """Replace elements in place with their maximum over the ranks of the named axes."""
        return self._reduce_over(tensor, axes, dist.ReduceOp.MAX)

    def _reduce_over(
        self, tensor: Tensor, axes: Sequence[str], operation: dist.ReduceOp.RedOpType
    ) -> Tensor:
        for group in self._find_fewest_groups(axes):
            with time_wait(group):
                dist.all_reduce(tensor, operation, group=group)
        return tensor

    def _find_fewest_groups(self, axes: Sequence[str]) -> list[dist.ProcessGroup]:
        """List groups such that reducing over one after another reduces over `axes`."""
        several = [axis for axis in axes if self.layout.degree(axis) > 1]
        ranks = self.grid.group_of(self.rank, several)
        if len(ranks) == 1:
            return []
        if (dist.group.WORLD, ranks, 0) in _groups:
            return [_groups[dist.group.WORLD, ranks, 0]]
        groups = [self.group(axis) for axis in several]
        return [group for group in groups if group is not None]


_PARALLELISM_OF_AXIS = {
    "tp": "tensor",
    "cp": "context",
    "pp": "pipeline",
    "ep": "expert",
} | dict.fromkeys(("dp_replicate", "dp_shard", "fsdp", "efsdp"), "data")


def _collect_disjoint(groups: Sequence[RankTuple]) -> list[list[RankTuple]]:
    """Distribute groups to as few lists as a first fit needs, each without a common rank.

    >>> _collect_disjoint([(0, 1), (1, 2), (2, 3)])
    [[(0, 1), (2, 3)], [(1, 2)]]
    """
    lists: list[list[RankTuple]] = []
    members: list[set[int]] = []
    for ranks in groups:
        place = next((i for i, known in enumerate(members) if known.isdisjoint(ranks)), len(lists))
        if place == len(lists):
            lists.append([])
            members.append(set())
        lists[place].append(ranks)
        members[place].update(ranks)
    return lists


def _list_axis_sets(layout: Layout) -> list[tuple[str, ...]]:
    """List the sets of axes over which anything is exchanged."""
    singles: list[tuple[str, ...]] = [
        (axis,) for axis in (*AXES, "fsdp", *EXPERT_AXES) if layout.degree(axis) > 1
    ]
    together = [
        ("dp_replicate", "fsdp"),
        ("dp_replicate", "efsdp"),
        ("dp_replicate", *FSDP_AXES[1:]),
        AXES,
    ]
    return singles + together


_meshes: dict[tuple[dist.ProcessGroup | None, str, Layout], Mesh] = {}


def build_mesh(layout: Layout, device_type: str) -> Mesh | None:
    """Build the mesh of a layout; None for a single rank, which needs no process group.

    Raises:
        LayoutError: the layout's world size is not the number of running ranks.
    """
    if layout.world_size == 1:
        return None
    running = dist.get_world_size()
    if layout.world_size != running:
        raise LayoutError(
            f"the layout needs {layout.world_size} ranks, but {running} are running",
            field="layout",
            got=str(layout),
        )
    key = (dist.group.WORLD, device_type, layout)
    if key not in _meshes:
        _meshes[key] = Mesh(layout, device_type)
    return _meshes[key]


def sum_over(tensor: Tensor, axes: Sequence[str], mesh: Mesh | None) -> Tensor:
    """Sum `tensor` in place over the ranks of the named axes; unchanged without a mesh."""
    return tensor if mesh is None else mesh.sum_over(tensor, axes)
