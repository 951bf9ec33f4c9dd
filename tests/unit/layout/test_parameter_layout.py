"""Local boxes of ranks tile a parameter once per copy and equal torch.chunk in each section."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwright.layout import (
    DimSection,
    Layout,
    ParameterLayout,
    RankGrid,
    Shard,
    compute_local_boxes,
    compute_local_shape,
)

degrees = st.integers(1, 4)


def count_elements(parameter: ParameterLayout, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Count the copies of each element, and its first copies among neighbouring ranks."""
    copies = np.zeros(parameter.shape, dtype=int)
    first_copies = np.zeros(parameter.shape, dtype=int)
    for rank in range(layout.world_size):
        here = RankGrid(layout).coordinates(rank)
        local = np.zeros(compute_local_shape(parameter, layout, here), dtype=int)
        for box in compute_local_boxes(parameter, layout, here):
            part = tuple(slice(start, start + length) for start, length in box.global_bounds)
            copies[part] += 1
            first_copies[part] += box.is_first_copy
            local[tuple(slice(start, start + length) for start, length in box.local_bounds)] += 1
        assert (local == 1).all()
    return copies, first_copies


@given(
    rows=st.integers(0, 17),
    replicate=degrees,
    shard=degrees,
    cp=degrees,
    tp=degrees,
    columns=st.booleans(),
)
def test_boxes_tile_the_parameter_once_per_copy(
    rows: int, replicate: int, shard: int, cp: int, tp: int, columns: bool
) -> None:
    layout = Layout(dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, zero_stage=3)
    parameter = ParameterLayout(
        "w", (rows, 5), (Shard("tp", 0 if columns else 1), Shard("fsdp", 0))
    )
    copies, first_copies = count_elements(parameter, layout)
    assert (copies == replicate).all()
    assert (first_copies == replicate).all()


@given(
    heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 4]),
    kv_pieces=st.sampled_from([1, 2, 4]),
    shard=degrees,
)
def test_a_fused_projection_with_shared_key_value_heads_is_tiled(
    heads: int, group: int, kv_pieces: int, shard: int
) -> None:
    tp = 4
    keys = 4 * heads
    queries = keys * group
    sections = (
        DimSection(0, queries, tp),
        DimSection(queries, keys, kv_pieces),
        DimSection(queries + keys, keys, kv_pieces),
    )
    parameter = ParameterLayout(
        "qkv", (queries + 2 * keys, 2), (Shard("tp", 0, sections), Shard("fsdp", 0))
    )
    copies, first_copies = count_elements(parameter, Layout(dp_shard=shard, tp=tp, zero_stage=3))
    assert (copies[:queries] == 1).all()
    assert (copies[queries:] == tp // kv_pieces).all()
    assert (first_copies == 1).all()


@given(rows=st.integers(1, 17), shard=degrees, ep=st.sampled_from([1, 2]))
def test_experts_are_sharded_over_ep_first(rows: int, shard: int, ep: int) -> None:
    layout = Layout(dp_shard=shard * ep, ep=ep, zero_stage=1)
    parameter = ParameterLayout("experts", (4, rows), (Shard("ep", 0), Shard("efsdp", 1)))
    copies, _ = count_elements(parameter, layout)
    assert (copies == 1).all()


def test_slices_are_those_of_torch_chunk() -> None:
    layout = Layout(dp_shard=4, zero_stage=3)
    parameter = ParameterLayout("w", (5, 3), (Shard("fsdp", 0),))
    grid = RankGrid(layout)
    assert [
        [
            box.global_bounds
            for box in compute_local_boxes(parameter, layout, grid.coordinates(rank))
        ]
        for rank in range(4)
    ] == [
        [((0, 2), (0, 3))],
        [((2, 2), (0, 3))],
        [((4, 1), (0, 3))],
        [],
    ]
    assert compute_local_shape(parameter, layout, grid.coordinates(3)) == (0, 3)


def test_stages_without_a_parameter_have_no_boxes() -> None:
    layout = Layout(pp=2)
    parameter = ParameterLayout("w", (5, 3), pp_ranks=(1,))
    grid = RankGrid(layout)
    assert [
        len(compute_local_boxes(parameter, layout, grid.coordinates(rank))) for rank in range(2)
    ] == [0, 1]
