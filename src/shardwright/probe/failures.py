"""How often a run of a size is expected to break, and how often it should therefore save."""

from __future__ import annotations

import math

GPU_HOURS_PER_FAILURE = 50_675.0
"""Unexpected interruptions of Llama 3 405B: 419 in 54 days on 16,384 H100s (arXiv 2407.21783, section 3.3.4, table 5)."""


def seconds_between_failures(num_gpus: int) -> float:
    """Mean time between interruptions of a run.

    >>> round(seconds_between_failures(16_384) / 3600, 1)
    3.1
    """
    return GPU_HOURS_PER_FAILURE * 3600.0 / num_gpus


def best_save_interval(save_seconds: float, between_failures_seconds: float) -> float:
    """Seconds between saves that cost least, saving and lost work together: the square root of 2 x cost x mean time.

    Source: Young 1974, A first order approximation to the optimum checkpoint interval, CACM 17(9).

    >>> best_save_interval(2.0, 10_000.0)
    200.0
    """
    return math.sqrt(2.0 * save_seconds * between_failures_seconds)


def lost_share(interval_seconds: float, save_seconds: float, restart_seconds: float, between_failures_seconds: float) -> float:
    """Share of the time that saving, repeated work (half an interval per failure) and restarts take.

    >>> round(lost_share(200.0, 2.0, 0.0, 10_000.0), 3)
    0.02
    """
    return save_seconds / interval_seconds + (interval_seconds / 2 + restart_seconds) / between_failures_seconds
