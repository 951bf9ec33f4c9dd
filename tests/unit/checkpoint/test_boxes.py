"""Boxes: exact covers in any arrangement; splits equal torch.chunk."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.checkpoint.boxes import (
    Box,
    DimSplit,
    build_full_box,
    compute_boxes,
    find_cover_fault,
)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.data())
def test_cover_faults_agree_with_element_counts(shape: list[int], data: st.DataObject) -> None:
    """Compare random boxes, often a partition plus others, with a count of every element."""
    box = (
        st.tuples(*(st.integers(0, size) for size in shape)),
        st.tuples(*(st.integers(1, 5) for _ in shape)),
    )
    boxes = [Box(*pair) for pair in data.draw(st.lists(st.tuples(*box), max_size=4))]
    if data.draw(st.booleans()):
        boxes += split_randomly(build_full_box(shape), data)
    inside = [
        b
        for b in boxes
        if all(o + n <= s for o, n, s in zip(b.offsets, b.lengths, shape, strict=True))
    ]
    count = np.zeros(shape, dtype=int)
    for b in inside:
        count[tuple(slice(o, o + n) for o, n in zip(b.offsets, b.lengths, strict=True))] += 1
    exact = len(inside) == len(boxes) and bool((count == 1).all())
    assert (find_cover_fault(shape, boxes) is None) == exact


def split_randomly(box: Box, data: st.DataObject) -> list[Box]:
    if box.num_elements <= 1 or data.draw(st.booleans()):
        return [box] if box.num_elements else []
    dim = data.draw(st.sampled_from([d for d, length in enumerate(box.lengths) if length > 1]))
    at = data.draw(st.integers(1, box.lengths[dim] - 1))
    first = Box(box.offsets, tuple(at if d == dim else n for d, n in enumerate(box.lengths)))
    offsets = tuple(o + at if d == dim else o for d, o in enumerate(box.offsets))
    second = Box(offsets, tuple(n - at if d == dim else n for d, n in enumerate(box.lengths)))
    return split_randomly(first, data) + split_randomly(second, data)


@pytest.mark.parametrize(
    ("boxes", "fault"),
    [
        ([Box((0,), (3,))], "slices hold 3 of 4 elements"),
        ([Box((0,), (4,)), Box((0,), (4,))], "slices overlap"),
        ([Box((0,), (2,)), Box((1,), (2,))], "slices overlap"),
        ([Box((0,), (5,))], "lies outside"),
        ([Box((-1,), (5,))], "lies outside"),
        ([Box((0, 0), (2, 2))], "lies outside"),
        ([Box((0,), (4,)), Box((0,), (0,))], "lies outside"),
    ],
)
def test_wrong_covers_are_refused_with_the_fault(boxes: list[Box], fault: str) -> None:
    assert fault in str(find_cover_fault((4,), boxes))


def test_many_slices_are_checked_in_linear_time() -> None:
    columns = [Box((0, column), (10**9, 1)) for column in range(20_000)]
    start = time.process_time()
    assert find_cover_fault((10**9, 20_000), columns) is None
    assert "overlap" in str(find_cover_fault((10**9, 20_000), [*columns[:-1], columns[0]]))
    assert time.process_time() - start < 10


@given(st.integers(0, 23), st.integers(1, 5))
def test_plain_splits_are_torch_chunks(size: int, num_chunks: int) -> None:
    chunks = torch.arange(size).chunk(num_chunks)
    for index in range(num_chunks):
        boxes = compute_boxes((size,), [DimSplit(0, num_chunks, index)])
        expected = chunks[index].tolist() if index < len(chunks) else []
        assert [
            i for b in boxes for i in range(b.offsets[0], b.offsets[0] + b.lengths[0])
        ] == expected


@given(st.integers(0, 30), st.integers(1, 4), st.integers(1, 4))
def test_a_strided_split_equals_two_splits_in_the_other_order(
    size: int, outer: int, inner: int
) -> None:
    for a in range(outer):
        for b in range(inner):
            chunks = torch.arange(size).chunk(inner)
            part = chunks[b].chunk(outer) if b < len(chunks) else ()
            expected = part[a].tolist() if a < len(part) else []
            # An uneven strided split is reassembled by sizes, not by origin: only even ones agree.
            if size % (outer * inner) == 0:
                boxes = compute_boxes(
                    (size,), [DimSplit(0, outer, a, stride=inner), DimSplit(0, inner, b)]
                )
                assert [
                    i
                    for box in boxes
                    for i in range(box.offsets[0], box.offsets[0] + box.lengths[0])
                ] == expected
