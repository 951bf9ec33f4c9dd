"""Rows split over context ranks by work: visible keys are counted, and their sums are balanced."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.layout.context_method import (
    assign_chunks,
    check_context_parallel,
    count_chunks_by_work,
)
from shardwright.parallel.context.row_split import assign_chunks_by_work, count_visible_keys


@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=24), min_size=1, max_size=3),
    windows=st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=3),
)
def test_visible_keys_are_counted_by_chunk(
    lengths: list[list[int]], windows: list[int | None]
) -> None:
    rows = [np.repeat(np.arange(len(row)), row)[:24] for row in lengths]
    ids_BT = np.stack([np.pad(row, (0, 24 - len(row)), constant_values=99) for row in rows])
    distance_TT = np.arange(24)[:, None] - np.arange(24)
    expected_T = np.zeros(24)
    for row in ids_BT:
        for window in windows:
            visible_TT = (row[:, None] == row) & (distance_TT >= 0)
            if window is not None:
                visible_TT &= distance_TT < window
            expected_T += visible_TT.sum(1)
    counted_C = count_visible_keys(ids_BT, tuple(windows), 8)
    assert counted_C.tolist() == expected_T.reshape(8, 3).sum(1).tolist()


def draw_row(num_tokens: int, seed: int) -> np.ndarray:
    """Draw a packed row of documents of 2,000 tokens on average, some of them long."""
    lengths = np.random.default_rng(seed).lognormal(np.log(2000) - 0.72, 1.2, size=400)
    ids_T = np.repeat(np.arange(400), lengths.astype(int) + 1)[:num_tokens]
    assert len(ids_T) == num_tokens
    return ids_T[None]


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_ranks_have_as_many_chunks_and_similar_work(degree: int) -> None:
    shares = {"zigzag": [], "work": []}  # type: dict[str, list[float]]
    for seed in range(10):
        ids_BT = draw_row(16384, seed)
        num_chunks = count_chunks_by_work(degree, 16384)
        assert num_chunks == 8 * degree
        work_C = count_visible_keys(ids_BT, (None,), num_chunks)
        chunks = assign_chunks_by_work(work_C, degree)
        assert sorted(chunk for own in chunks for chunk in own) == list(range(num_chunks))
        assert {len(own) for own in chunks} == {8}
        assert all(list(own) == sorted(own) for own in chunks)
        wide_C = work_C.reshape(2 * degree, -1).sum(1)
        for name, by_rank, work in (
            ("work", chunks, work_C), ("zigzag", assign_chunks("ring", degree), wide_C),
        ):  # fmt: skip
            sums = [sum(work[chunk] for chunk in own) for own in by_rank]
            shares[name].append(max(sums) * degree / sum(sums))
    assert max(shares["work"]) < 1.1
    assert np.mean(shares["zigzag"]) > 1.2


def test_short_and_odd_rows_have_fewer_chunks() -> None:
    assert count_chunks_by_work(2, 128) == 16
    assert count_chunks_by_work(2, 64) == 8
    assert count_chunks_by_work(2, 8 * 17) == 8
    assert count_chunks_by_work(2, 4 * 33) == 4


def test_a_method_that_splits_heads_is_refused() -> None:
    sizes = SimpleNamespace(num_heads=8, num_kv_heads=4, windows=(None,))
    with pytest.raises(LayoutError, match=r"layout\.cp_split.*ulysses.*cp_method: ring"):
        check_context_parallel(Layout(cp=2, cp_split="work"), sizes, 64)
    check_context_parallel(Layout(cp=2, cp_split="work", cp_method="ring"), sizes, 64)
