"""Order of samples: a permutation per epoch, a function of seed and position, on any layout."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.data.sample_order import SampleOrder, permute

sizes = st.integers(min_value=1, max_value=3000)
keys = st.integers(min_value=0, max_value=2**64 - 1)


@given(size=sizes, key=keys)
@settings(max_examples=60, deadline=None)
def test_permute_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


@pytest.mark.parametrize("size", [10**9 + 7, 2**40, 2**40 + 1])
def test_permute_of_large_sizes_stays_in_range(size: int) -> None:
    images = [permute(index, size, key=3) for index in (0, 1, size // 2, size - 1)]
    assert all(0 <= image < size for image in images)
    assert len(set(images)) == 4


@given(size=st.integers(min_value=1, max_value=400), seed=st.integers(min_value=0, max_value=2**70))
@settings(max_examples=40, deadline=None)
def test_every_epoch_reads_every_sample_once(size: int, seed: int) -> None:
    order = SampleOrder(seed, size)
    for epoch in range(3):
        positions = range(epoch * size, (epoch + 1) * size)
        assert {order.get_epoch(position) for position in positions} == {epoch}
        assert sorted(order.get_index(position) for position in positions) == list(range(size))


def test_epochs_and_seeds_differ() -> None:
    def read(seed: int, epoch: int) -> list[int]:
        return [SampleOrder(seed, 100).get_index(epoch * 100 + i) for i in range(100)]

    orders = [tuple(read(seed, epoch)) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == len(orders)


def test_order_never_changes() -> None:
    """The numbers are fixed: a run resumed by a later version must continue in the same order."""
    order = SampleOrder(seed=1234, num_samples=10)
    assert [order.get_index(position) for position in range(20)] == [
        4,
        3,
        5,
        1,
        6,
        9,
        2,
        0,
        7,
        8,
        9,
        1,
        0,
        6,
        8,
        2,
        3,
        5,
        7,
        4,
    ]


def test_order_is_uniform() -> None:
    """Every sample is equally likely at every position: 4,000 seeds of 5 samples, chi-square."""
    counts = Counter(
        (place, SampleOrder(seed, 5).get_index(place)) for seed in range(4000) for place in range(5)
    )
    chi_square = sum(
        (counts[place, index] - 800) ** 2 / 800 for place in range(5) for index in range(5)
    )
    assert chi_square < 60


def test_neighbours_are_separated() -> None:
    order = SampleOrder(seed=5, num_samples=10_000)
    indices = [order.get_index(position) for position in range(10_000)]
    together = sum(abs(a - b) == 1 for a, b in pairwise(indices))
    assert together < 20  # a random order has 2 on average


def test_no_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        SampleOrder(0, 0)
