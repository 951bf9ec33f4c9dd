"""Outliers are named; common scatter and noise give none."""

from __future__ import annotations

import pytest

from shardwright.doctor.finding import Finding
from shardwright.doctor.outliers import (
    CPU_THRESHOLDS,
    DEVICE_THRESHOLDS,
    LINK_THRESHOLDS,
    find_outliers,
)


def test_of_two_members_only_the_slower_is_an_outlier() -> None:
    (outlier,) = find_outliers({0: 10.0, 1: 100.0}, DEVICE_THRESHOLDS)
    assert (outlier.key, outlier.verdict, outlier.share) == (0, "fail", pytest.approx(0.1))


def test_a_single_member_is_no_outlier() -> None:
    assert find_outliers({0: 1.0}, DEVICE_THRESHOLDS) == []


def test_similar_ranks_pass() -> None:
    # TFLOP/s of eight equal GPUs, which differ by a few percent.
    rates = dict(enumerate([752.0, 748.0, 760.0, 744.0, 755.0, 750.0, 739.0, 757.0]))
    assert find_outliers(rates, DEVICE_THRESHOLDS) == []


def test_a_throttled_device_among_eight_is_named_with_the_others_median() -> None:
    rates = dict(enumerate([752.0, 748.0, 760.0, 410.0, 755.0, 750.0, 739.0, 757.0]))
    (outlier,) = find_outliers(rates, DEVICE_THRESHOLDS)
    assert outlier.key == 3
    assert outlier.median_of_others == 752.0
    assert outlier.verdict == "fail"


def test_a_slow_minority_does_not_move_the_median() -> None:
    rates = {rank: 20.0 if rank in (1, 6, 7) else 100.0 + rank for rank in range(8)}
    assert sorted(outlier.key for outlier in find_outliers(rates, LINK_THRESHOLDS)) == [1, 6, 7]


def test_members_with_wide_scatter_are_not_outliers() -> None:
    rates = dict(enumerate([40.0, 55.0, 70.0, 85.0, 100.0, 115.0, 130.0, 145.0]))
    # The slowest is within three scatters of the rest.
    assert find_outliers(rates, LINK_THRESHOLDS) == []
    # One that has almost stopped is reported anyway.
    assert [outlier.key for outlier in find_outliers({**rates, 7: 2.0}, LINK_THRESHOLDS)] == [7]


def test_thresholds_determine_the_verdict() -> None:
    assert [outlier.verdict for outlier in find_outliers({0: 1.0, 1: 0.5}, CPU_THRESHOLDS)] == [
        "warn"
    ]
    assert [outlier.verdict for outlier in find_outliers({0: 1.0, 1: 0.2}, CPU_THRESHOLDS)] == [
        "fail"
    ]
    assert find_outliers({0: 1.0, 1: 0.7}, CPU_THRESHOLDS) == []


def test_a_finding_that_does_not_pass_needs_a_remedy() -> None:
    with pytest.raises(AssertionError, match="without a remedy"):
        Finding("rates", "products", "warn", "slow")
