"""Set-up of process groups on NCCL, counted for 512 ranks: world-wide steps and communicators.

A fake process group stands for 512 ranks; `dist.split_group` is replaced by a function with its
contract. `before` is one `dist.new_group` per group with both backends, as without NCCL's splits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.errors import RankFailed
from shardwright.launch.rank_outcome import is_lost_peer_message
from shardwright.layout import Layout
from shardwright.parallel import mesh as mesh_module
from shardwright.parallel.mesh import (
    Mesh,
    abandon_process_groups,
    abort_nccl_groups,
    check_nccl_groups,
    get_host_group,
)

TIMEOUT = timedelta(seconds=77)
WORLD_SIZE = 512


@dataclass
class GroupCount:
    """Set-up of one rank after the default group."""

    world_steps: int = 0
    """Calls that every rank of the world makes together."""
    nccl_communicators: int = 0
    gloo_groups: int = 0
    gloo_connections: int = 0
    """Sockets to other ranks."""
    descriptions: list[str | None] = field(default_factory=list)
    backends: dict[dist.ProcessGroup, str] = field(default_factory=dict)

    def summarise(self) -> tuple[int, int, int, int]:
        return (
            self.world_steps,
            self.nccl_communicators,
            self.gloo_groups,
            self.gloo_connections,
        )


@contextmanager
def count_groups(
    monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int = WORLD_SIZE
) -> Iterator[GroupCount]:
    """Count the groups of a rank; the default group is a fake one."""
    count = GroupCount()
    make_default = dist.init_process_group
    make_group = dist.new_group

    def init_process_group(backend: str, **options: Any) -> None:
        assert (backend, options["timeout"]) == ("nccl", TIMEOUT)
        assert options["device_id"] == torch.device("cuda", 0)
        make_default("fake", rank=rank, world_size=world_size, store=FakeStore())
        assert dist.group.WORLD is not None
        count.backends[dist.group.WORLD] = "nccl"

    def new_group(
        ranks: list[int] | None = None, *, backend: str = "both", timeout: timedelta | None = None
    ) -> Any:
        count.world_steps += 1
        members = list(range(world_size)) if ranks is None else ranks
        group = make_group(members)
        if rank in members:
            count.backends[group] = backend
            count.nccl_communicators += backend != "gloo"
            count.gloo_groups += 1
            count.gloo_connections += len(members) - 1
        return group

    def split_group(
        *, split_ranks: list[list[int]], timeout: timedelta, group_desc: str | None
    ) -> Any:
        assert timeout == TIMEOUT
        # A rank in no group would give the later groups other names on this rank.
        assert sorted(rank for ranks in split_ranks for rank in ranks) == list(range(world_size))
        count.world_steps += 1
        count.nccl_communicators += 1
        count.descriptions.append(group_desc)
        own = next(ranks for ranks in split_ranks if rank in ranks)
        group = make_group(own)
        count.backends[group] = "nccl"
        return group

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name, function in (
        ("init_process_group", init_process_group),
        ("new_group", new_group),
        ("split_group", split_group),
    ):
        monkeypatch.setattr(dist, name, function)
    try:
        yield count
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()


def set_up(layout: Layout) -> Mesh:
    """Create a layout's groups as training does, for a model whose embedding is its head."""
    mesh = Mesh(layout, "cuda")
    if layout.zero_stage and layout.fsdp == 1:
        mesh.join_single_group()
    if layout.pp > 1:
        mesh.join_group([(ranks[0], ranks[-1]) for ranks in mesh.grid.groups(["pp"])])
    return mesh


BEFORE_AND_AFTER = {
    Layout(dp_shard=512, zero_stage=3): ((1, 1, 2, 1022), (1, 1, 1, 511)),
    Layout(dp_replicate=8, dp_shard=64, zero_stage=3): ((73, 3, 4, 1092), (3, 3, 1, 511)),
    Layout(dp_shard=64, tp=8, zero_stage=3): ((73, 3, 4, 1092), (3, 3, 1, 511)),
    Layout(dp_replicate=16, tp=8, pp=4): ((353, 5, 6, 1048), (5, 5, 1, 511)),
    Layout(dp_shard=8, cp=2, tp=8, pp=4, zero_stage=2): ((673, 7, 8, 1056), (7, 7, 1, 511)),
    Layout(dp_shard=64, ep=16, tp=2, pp=4, zero_stage=1): ((681, 7, 8, 1108), (7, 7, 1, 511)),
}
"""World-wide steps; and, of rank 0, NCCL communicators, gloo groups and their connections. The
table in docs/decisions/0064-one-backend-per-group.md."""


@pytest.mark.parametrize("layout", BEFORE_AND_AFTER, ids=str)
def test_the_set_up_of_512_ranks(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = BEFORE_AND_AFTER[layout]
    with count_groups(monkeypatch, 0) as count:
        # Both backends in the default group and its subgroups, one more gloo group for the numbers
        # of a step, and a call per group.
        dist.init_process_group("nccl", timeout=TIMEOUT, device_id=torch.device("cuda", 0))
        dist.new_group(backend="gloo")
        set_up(layout)
        steps, communicators, gloo_groups, connections = count.summarise()
        assert (steps, communicators + 1, gloo_groups + 1, connections + WORLD_SIZE - 1) == before
    for rank in (0, 301):
        with count_groups(monkeypatch, rank) as count:
            mesh_module.init_process_group("cuda", timeout=TIMEOUT)
            set_up(layout)
            steps, communicators, *gloo = count.summarise()
            assert (steps, communicators + 1, *gloo) == after


def test_every_subgroup_has_one_backend_and_the_ranks_of_its_axis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = 301
    layout = Layout(dp_shard=16, ep=4, cp=2, tp=4, pp=4, zero_stage=1)
    with count_groups(monkeypatch, rank) as count:
        mesh_module.init_process_group("cuda", timeout=TIMEOUT)
        mesh = set_up(layout)
        assert count.descriptions == ["pp", "dp_shard", "cp", "tp", "fsdp", "efsdp", "ep", None]
        (host,) = [group for group, backend in count.backends.items() if backend == "gloo"]
        assert get_host_group() is host
        assert host.size() == WORLD_SIZE
        for axis in ("dp_replicate", "dp_shard", "fsdp", "efsdp", "tp", "cp", "pp", "ep"):
            group = mesh.group(axis)
            ranks = mesh.grid.group_of(rank, [axis])
            assert (group is None) == (len(ranks) == 1)
            if group is not None:
                assert tuple(dist.get_process_group_ranks(group)) == ranks
                assert count.backends[group] == "nccl"
        steps = count.world_steps
        set_up(layout)  # a second model of the same layout makes no group
        assert count.world_steps == steps


@pytest.mark.parametrize("shard_axis", ["fsdp", "efsdp"])
def test_fsdp_gets_a_mesh_of_split_groups(shard_axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(dp_replicate=2, dp_shard=8, ep=2, tp=2, zero_stage=3)
    with count_groups(monkeypatch, 5, layout.world_size) as count:
        mesh_module.init_process_group("cuda", timeout=TIMEOUT)
        mesh = Mesh(layout, "cuda")
        device_mesh = mesh.device_mesh(shard_axis)
        assert device_mesh.mesh_dim_names == ("dp_replicate", shard_axis)
        for axis in device_mesh.mesh_dim_names:
            group = device_mesh.get_group(axis)
            assert count.backends[group] == "nccl"
            assert tuple(dist.get_process_group_ranks(group)) == mesh.grid.group_of(5, [axis])


def test_groups_that_share_ranks_are_split_in_several_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = Layout(pp=4)
    with count_groups(monkeypatch, 2, 4) as count:
        mesh_module.init_process_group("cuda", timeout=TIMEOUT)
        mesh = Mesh(layout, "cuda")
        steps = count.world_steps
        group = mesh.join_group([(0, 1), (1, 2), (2, 3)])
        assert group is not None
        assert dist.get_process_group_ranks(group) == [2, 3]
        assert count.world_steps == steps + 2
        again = mesh.join_group([(1, 2)])
        assert again is not None
        assert dist.get_process_group_ranks(again) == [1, 2]
        assert count.world_steps == steps + 2


def test_copies_of_a_group_are_other_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(dp_shard=2, pp=2)
    for pipelines, copies in (([(0, 2), (1, 3)], 2), ([(0, 1, 2, 3)], 1)):
        with count_groups(monkeypatch, 3, 4) as count:
            mesh_module.init_process_group("cuda", timeout=TIMEOUT)
            mesh = Mesh(layout, "cuda")
            steps = count.world_steps
            groups = [mesh.join_group(pipelines, "channel", copy=copy) for copy in range(3)]
            assert count.world_steps == steps + 2  # the first one exists
            assert len(set(groups)) == 3
            for group in groups:
                assert group is not None
                assert dist.get_process_group_ranks(group) == list(pipelines[-1])
            assert mesh.join_group(pipelines, copy=copies) is groups[copies]
            assert count.world_steps == steps + 2


def test_groups_on_the_cpu_are_made_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    make_group = dist.new_group
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    monkeypatch.setattr(
        dist,
        "new_group",
        lambda ranks, **options: calls.append((ranks, options)) or make_group(ranks),
    )
    try:
        mesh = Mesh(Layout(dp_shard=4, tp=2, zero_stage=3), "cpu")
        assert [ranks for ranks, _ in calls] == [
            *map(list, mesh.grid.groups(["dp_shard"])),
            *map(list, mesh.grid.groups(["tp"])),
        ] or calls
        assert all(options == {"timeout": None} for _, options in calls)
        assert get_host_group() is None
    finally:
        dist.destroy_process_group()


@pytest.fixture
def one_group(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A world on NCCL with one more group, whose errors a test sets."""
    monkeypatch.setattr(mesh_module, "_aborted", threading.Event())
    states = SimpleNamespace(world="SUCCESS", tp="SUCCESS")

    def build(name: str) -> SimpleNamespace:
        backend = SimpleNamespace(get_error=lambda: SimpleNamespace(name=getattr(states, name)))
        return SimpleNamespace(_get_backend=lambda _device: backend, group_desc=name)

    world, tp = (Group(**vars(build(name))) for name in ("world", "tp"))
    monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", world)
    monkeypatch.setattr(mesh_module, "_worlds", {world: mesh_module._World(TIMEOUT, True, None)})
    outside = dist.GroupMember.NON_GROUP_MEMBER
    monkeypatch.setattr(mesh_module, "_groups", {(world, (0, 1), 0): tp, (world, (2,), 0): outside})
    return states


class Group(SimpleNamespace):
    __hash__ = object.__hash__


@pytest.mark.parametrize("name", ["world", "tp"])
def test_results_of_an_operation_that_failed_are_refused(
    one_group: SimpleNamespace, name: str
) -> None:
    """The survivors of a warm restart continue after NCCL has aborted what they waited for."""
    check_nccl_groups()
    setattr(one_group, name, "TIMEOUT")
    with pytest.raises(RankFailed, match=f"aborted: TIMEOUT in the group {name}") as caught:
        check_nccl_groups()
    assert is_lost_peer_message(str(caught.value))


def test_results_after_an_abort_are_refused_until_the_groups_are_left(
    one_group: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    abort_nccl_groups()
    with pytest.raises(RankFailed, match="a rank is lost"):
        check_nccl_groups()
    abandon_process_groups()
    check_nccl_groups()
