"""The odd member is named; a scatter that all share, and noise, name nobody."""

from __future__ import annotations

import pytest

from shardwright.doctor.finding import Finding
from shardwright.doctor.outliers import (
    CPU_THRESHOLDS,
    DEVICE_THRESHOLDS,
    LINK_THRESHOLDS,
    find_outliers,
)


def test_of_two_the_slower_is_odd_and_the_faster_never() -> None:
    (odd,) = find_outliers({0: 10.0, 1: 100.0}, DEVICE_THRESHOLDS)
    assert (odd.key, odd.verdict, odd.share) == (0, "fail", pytest.approx(0.1))


def test_one_alone_cannot_be_odd() -> None:
    assert find_outliers({0: 1.0}, DEVICE_THRESHOLDS) == []


def test_alike_ranks_pass() -> None:
    # As eight GPUs of one kind differ: a few percent, TFLOP/s.
    rates = dict(enumerate([752.0, 748.0, 760.0, 744.0, 755.0, 750.0, 739.0, 757.0]))
    assert find_outliers(rates, DEVICE_THRESHOLDS) == []


def test_a_throttled_device_among_eight_is_named_with_the_others_median() -> None:
    rates = dict(enumerate([752.0, 748.0, 760.0, 410.0, 755.0, 750.0, 739.0, 757.0]))
    (odd,) = find_outliers(rates, DEVICE_THRESHOLDS)
    assert odd.key == 3
    assert odd.median_of_others == 752.0
    assert odd.verdict == "fail"


def test_a_slow_minority_does_not_move_the_middle() -> None:
    rates = {rank: 20.0 if rank in (1, 6, 7) else 100.0 + rank for rank in range(8)}
    assert sorted(odd.key for odd in find_outliers(rates, LINK_THRESHOLDS)) == [1, 6, 7]


def test_many_that_scatter_widely_are_not_each_told() -> None:
    rates = dict(enumerate([40.0, 55.0, 70.0, 85.0, 100.0, 115.0, 130.0, 145.0]))
    assert (
        find_outliers(rates, LINK_THRESHOLDS) == []
    )  # the slowest lies within three scatters of the rest
    assert [odd.key for odd in find_outliers({**rates, 7: 2.0}, LINK_THRESHOLDS)] == [
        7
    ]  # one that nearly stands still is told all the same


def test_limits_grade() -> None:
    assert [odd.verdict for odd in find_outliers({0: 1.0, 1: 0.5}, CPU_THRESHOLDS)] == ["warn"]
    assert [odd.verdict for odd in find_outliers({0: 1.0, 1: 0.2}, CPU_THRESHOLDS)] == ["fail"]
    assert find_outliers({0: 1.0, 1: 0.7}, CPU_THRESHOLDS) == []


def test_a_finding_that_does_not_pass_says_what_to_do() -> None:
    with pytest.raises(AssertionError, match="without a remedy"):
        Finding("rates", "products", "warn", "slow")
