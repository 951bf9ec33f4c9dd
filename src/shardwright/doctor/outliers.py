"""Detection of a rank, group or link that is slower than the others.

Each member is compared with the median of all others: with two members that is the other one,
with many a slow minority does not move it. A member is an outlier if its rate is below a share
of that median. With five members or more it must also be slower by a factor of more than three
times the others' scatter: 1.4826 times the median absolute deviation of the logarithms of their
rates, which for a normal distribution is the standard deviation. With logarithms, a member that
has stopped is an outlier however much the others scatter. Rates are the best of several
rounds, because other work can only reduce them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from statistics import median
from typing import Generic, TypeVar

from shardwright.doctor.finding import Verdict, grade_share

Key = TypeVar("Key")

_MIN_OTHERS_FOR_SCATTER = 4
"""Minimum number of other members for a meaningful scatter."""
_NUM_SCATTERS = 3.0
_MAD_TO_STANDARD_DEVIATION = 1.4826


@dataclass(frozen=True)
class OutlierThresholds:
    """Shares of the others' median below which a member warns and fails."""

    warn: float
    fail: float


DEVICE_THRESHOLDS = OutlierThresholds(warn=0.9, fail=0.7)
"""Thresholds of accelerators; those of one model differ by a few percent."""
CPU_THRESHOLDS = OutlierThresholds(warn=0.6, fail=0.3)
"""Thresholds of CPUs, whose cores and memory other processes use, too."""
LINK_THRESHOLDS = OutlierThresholds(warn=0.7, fail=0.4)
"""Thresholds of links; links over a busy network vary more than devices."""


def choose_thresholds(device_kind: str) -> OutlierThresholds:
    """Choose the thresholds for the rates of `cpu` or `cuda` devices."""
    return CPU_THRESHOLDS if device_kind == "cpu" else DEVICE_THRESHOLDS


@dataclass(frozen=True)
class Outlier(Generic[Key]):
    """Slow member of a group, with its rate, the median of the others and the verdict."""

    key: Key
    rate: float
    median_of_others: float
    verdict: Verdict

    @property
    def share(self) -> float:
        """Rate as a share of the others' median."""
        return self.rate / self.median_of_others


def find_outliers(rates: Mapping[Key, float], thresholds: OutlierThresholds) -> list[Outlier[Key]]:
    """Find members that are slower than the others, slowest first; larger rates are better.

    >>> [slow.key for slow in find_outliers({0: 100.0, 1: 40.0}, OutlierThresholds(0.9, 0.7))]
    [1]
    >>> rates = {0: 100.0, 1: 99.0, 2: 101.0, 3: 60.0, 4: 100.0}
    >>> [slow.key for slow in find_outliers(rates, OutlierThresholds(0.9, 0.7))]
    [3]
    """
    outliers = []
    for key, rate in rates.items():
        others = [other for name, other in rates.items() if name != key]
        if not others:
            continue
        median_rate = median(others)
        verdict = grade_share(
            rate / median_rate, warn_below=thresholds.warn, fail_below=thresholds.fail
        )
        scatter = 0.0
        if len(others) >= _MIN_OTHERS_FOR_SCATTER:
            scatter = _MAD_TO_STANDARD_DEVIATION * median(
                abs(log(other / median_rate)) for other in others
            )
        if verdict != "pass" and log(median_rate / rate) > _NUM_SCATTERS * scatter:
            outliers.append(Outlier(key, rate, median_rate, verdict))
    return sorted(outliers, key=lambda outlier: outlier.share)
