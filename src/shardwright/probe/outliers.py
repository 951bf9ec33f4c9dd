"""Which rank, group or link is slower than the others, by a rule that one bad member cannot hide from.

Each member is held against the median of all the others: with two members that is the other one, with many it is a robust middle
that a slow minority does not move. A member is odd where its rate is below a share of that median and, of five members or more,
also by a larger factor than three times the usual scatter of the others: 1.4826 times the median absolute deviation of the
logarithms of their rates, which is the standard deviation of a normal distribution (in logarithms, so that what stands still is odd
however much the rest scatters). Rates are the best of several rounds, because other work only ever takes time away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from statistics import median
from typing import Generic, TypeVar

from shardwright.probe.finding import Verdict, graded

Key = TypeVar("Key")

_FEWEST_FOR_SCATTER = 4
"""Others from which their scatter says something."""
_SCATTERS = 3.0
_NORMAL = 1.4826


@dataclass(frozen=True)
class Limits:
    """Shares of the others' median below which a member is told, and below which it fails."""

    warn: float
    fail: float


DEVICE_LIMITS = Limits(warn=0.9, fail=0.7)
"""Accelerators of one kind lie within a few percent of each other."""
CPU_LIMITS = Limits(warn=0.6, fail=0.3)
"""Cores and their memory are shared with whatever else runs there."""
LINK_LIMITS = Limits(warn=0.7, fail=0.4)
"""Links of one kind; those over a busy network vary more than devices."""


def limits_for(device: str) -> Limits:
    """Of the rates of `cpu` or `cuda` devices."""
    return CPU_LIMITS if device == "cpu" else DEVICE_LIMITS


@dataclass(frozen=True)
class Odd(Generic[Key]):
    """A member with its rate, the others' median, and how bad that is."""

    key: Key
    rate: float
    others: float
    verdict: Verdict

    @property
    def share(self) -> float:
        """Of the others' median."""
        return self.rate / self.others


def find_odd(rates: Mapping[Key, float], limits: Limits) -> list[Odd[Key]]:
    """Members that are slower than the others, slowest first; larger rates are better.

    >>> [odd.key for odd in find_odd({0: 100.0, 1: 40.0}, Limits(0.9, 0.7))]
    [1]
    >>> [odd.key for odd in find_odd({0: 100.0, 1: 99.0, 2: 101.0, 3: 60.0, 4: 100.0}, Limits(0.9, 0.7))]
    [3]
    """
    found = []
    for key, rate in rates.items():
        others = [other for name, other in rates.items() if name != key]
        if not others:
            continue
        middle = median(others)
        verdict = graded(rate / middle, warn=limits.warn, fail=limits.fail)
        scatter = 0.0
        if len(others) >= _FEWEST_FOR_SCATTER:
            scatter = _NORMAL * median(abs(log(other / middle)) for other in others)
        if verdict != "pass" and log(middle / rate) > _SCATTERS * scatter:
            found.append(Odd(key, rate, middle, verdict))
    return sorted(found, key=lambda odd: odd.share)
