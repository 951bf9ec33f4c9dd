"""Degrees and ranks: resolved layouts, refusals, members of groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config.layout import LayoutSection
from shardwright.config.recipe_loading import parse_layout
from shardwright.errors import LayoutError
from shardwright.layout import AXES, Layout, RankGrid, resolve_layout

degree = st.integers(1, 4)


@pytest.mark.parametrize(
    ("text", "world_size", "expected"),
    [
        ("", 1, "zero_stage=0"),
        ("", 4, "dp_shard=4,zero_stage=3"),
        ("zero_stage=0", 4, "dp_replicate=4,zero_stage=0"),
        ("zero_stage=1", 3, "dp_shard=3,zero_stage=1"),
        ("dp_replicate=2", 4, "dp_replicate=2,dp_shard=2,zero_stage=3"),
        ("dp_shard=2", 4, "dp_replicate=2,dp_shard=2,zero_stage=3"),
        ("tp=2,dp_shard=2", 4, "dp_shard=2,tp=2,zero_stage=3"),
        ("dp_replicate=4", 4, "dp_replicate=4,zero_stage=0"),
        ("cp=2", 2, "cp=2,zero_stage=3"),
    ],
)
def test_an_omitted_degree_uses_the_remaining_ranks(
    text: str, world_size: int, expected: str
) -> None:
    assert str(resolve_layout(LayoutSection(**parse_layout(text)), world_size)) == expected


@pytest.mark.parametrize(
    ("text", "world_size", "message"),
    [
        ("tp=3", 4, "3 does not divide 4 ranks"),
        ("dp_shard=3", 4, "does not divide"),
        ("dp_shard=2,dp_replicate=4", 4, "= 8, but there are 4 ranks"),
        ("dp_shard=1,dp_replicate=1", 2, "Start 1 rank "),
        ("dp_shard=2,zero_stage=0", 2, "shards nothing"),
        ("ep=3", 4, "ep = 3 does not divide"),
        ("dp_shard=2,expert_dispatch=halves", 2, "without expert parallelism (ep 1)"),
        ("dp_shard=2,expert_dispatch=padded", 2, "without expert parallelism (ep 1)"),
        ("dp_shard=16,ep=16,expert_dispatch=deep_ep", 16, "certain numbers of ranks"),
        ("dp_shard=2,ep=2,expert_row_limit=2", 2, "has no limit of rows"),
        ("", 0, "at least one rank"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_the_arithmetic(
    text: str, world_size: int, message: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        resolve_layout(LayoutSection(**parse_layout(text)), world_size)
    assert message in str(caught.value)


@given(degree, degree, degree, degree, degree, st.data())
def test_a_layout_survives_a_round_trip_through_text(
    replicate: int, shard: int, tp: int, pp: int, cp: int, data: st.DataObject
) -> None:
    stage = 0 if shard * cp == 1 else data.draw(st.sampled_from([1, 2, 3]))
    layout = Layout(dp_replicate=replicate, dp_shard=shard, tp=tp, pp=pp, cp=cp, zero_stage=stage)
    assert resolve_layout(LayoutSection(**parse_layout(str(layout))), layout.world_size) == layout


@given(degree, degree, degree, degree, degree, st.sets(st.sampled_from(AXES)))
def test_groups_partition_the_ranks(
    replicate: int, shard: int, tp: int, pp: int, cp: int, axes: set[str]
) -> None:
    layout = Layout(dp_replicate=replicate, dp_shard=shard, tp=tp, pp=pp, cp=cp, zero_stage=1)
    grid = RankGrid(layout)
    groups = grid.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    for group in groups:
        fixed = [axis for axis in AXES if axis not in axes]
        assert len({tuple(grid.coordinates(rank)[axis] for axis in fixed) for rank in group}) == 1
        # Rank r counts 2^r: a wrong member changes the sum.
        assert sum(2**rank for rank in group) == sum(2**r for r in grid.group_of(group[0], axes))


@given(degree, degree, degree, degree, degree)
def test_ranks_and_coordinates_are_inverse(
    replicate: int, shard: int, tp: int, pp: int, cp: int
) -> None:
    grid = RankGrid(Layout(dp_replicate=replicate, dp_shard=shard, tp=tp, pp=pp, cp=cp))
    world = range(grid.layout.world_size)
    assert [grid.group_of(rank, ()) for rank in world] == [(rank,) for rank in world]
    data_ranks = [grid.data_rank(rank) for rank in world]
    assert sorted(set(data_ranks)) == list(range(replicate * shard))


def test_groups_of_512_ranks_have_the_right_members() -> None:
    # Rank r counts 2^r: the sum of a group determines its members, and the groups of an axis have
    # every rank once.
    layout = Layout(tp=8, pp=4, dp_shard=8, cp=2, ep=4, zero_stage=3)
    assert layout.world_size == 512
    grid = RankGrid(layout)
    all_ranks = sum(2**rank for rank in range(512))
    strides = {"tp": 1, "cp": 8, "dp_shard": 16, "fsdp": 8, "ep": 8, "efsdp": 32, "pp": 128}
    for axis, stride in strides.items():
        groups = grid.groups([axis])
        degree = layout.degree(axis)
        assert sum(sum(2**rank for rank in group) for group in groups) == all_ranks
        for group in groups:
            assert sum(2**rank for rank in group) == sum(
                2 ** (group[0] + stride * number) for number in range(degree)
            )
    assert grid.groups(["dp_replicate", "fsdp"]) == grid.groups(["fsdp"])
    assert grid.subgroups("tp", 4)[:2] == [(0, 1, 2, 3), (4, 5, 6, 7)]
