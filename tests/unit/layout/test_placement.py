"""Slices tile a parameter exactly once per copy, and lie where torch.chunk puts them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import LayoutError
from shardwright.layout import Layout, RankGrid, check_supported, local_slice, place_parameter

degrees = st.integers(1, 5)


@given(rows=st.integers(0, 17), columns=st.integers(1, 3), replicate=degrees, shard=degrees, stage=st.sampled_from([1, 2, 3]))
def test_slices_tile_the_whole_once_per_copy(rows: int, columns: int, replicate: int, shard: int, stage: int) -> None:
    layout = Layout(dp_replicate=replicate, dp_shard=shard, zero_stage=stage)  # type: ignore[arg-type]
    parameter = place_parameter("w", (rows, columns), layout)
    covered = np.zeros((rows, columns), dtype=int)
    for rank in range(layout.world_size):
        (first, height), (left, width) = local_slice(parameter, layout, RankGrid(layout).coordinates(rank))
        covered[first : first + height, left : left + width] += 1
    assert (covered == replicate).all()


def test_descriptors_name_who_cuts_who_copies_who_sums() -> None:
    hybrid = place_parameter("w", (4, 2), Layout(dp_replicate=2, dp_shard=2, zero_stage=1))
    assert (hybrid.shard_axes, hybrid.copy_axes, hybrid.sum_axes) == (
        ("dp_shard",),
        ("dp_replicate",),
        ("dp_replicate", "dp_shard"),
    )
    replicated = place_parameter("w", (4, 2), Layout(dp_replicate=2))
    assert (replicated.shard_axes, replicated.copy_axes, replicated.sum_axes) == ((), ("dp_replicate",), ("dp_replicate",))
    alone = place_parameter("w", (4, 2), Layout())
    assert (alone.shard_axes, alone.copy_axes, alone.sum_axes) == ((), (), ())


@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "ep"])
def test_what_is_not_built_is_refused_by_name(axis: str) -> None:
    with pytest.raises(LayoutError, match=rf"layout\.{axis}: .* is not built yet"):
        check_supported(Layout(**{axis: 2}))
