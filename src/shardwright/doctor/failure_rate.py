"""Expected failures of a run, and the interval between saves that minimises lost time."""

from __future__ import annotations

import math

GPU_HOURS_PER_FAILURE = 50_675.0
"""Unexpected interruptions of Llama 3 405B: 419 in 54 days on 16,384 H100s.

Source: arXiv 2407.21783, section 3.3.4, table 5.
"""


def estimate_seconds_between_failures(num_gpus: int) -> float:
    """Estimate the mean seconds between failures of a run.

    >>> round(estimate_seconds_between_failures(16_384) / 3600, 1)
    3.1
    """
    return GPU_HOURS_PER_FAILURE * 3600.0 / num_gpus


def compute_save_interval_seconds(save_seconds: float, seconds_between_failures: float) -> float:
    """Compute the seconds between saves that minimise the time for saves and repeated work.

    The square root of 2 x seconds of a save x mean seconds between failures.
    Source: Young 1974, A first order approximation to the optimum checkpoint interval,
    CACM 17(9).

    >>> compute_save_interval_seconds(2.0, 10_000.0)
    200.0
    """
    return math.sqrt(2.0 * save_seconds * seconds_between_failures)


def estimate_lost_share(
    interval_seconds: float,
    save_seconds: float,
    restart_seconds: float,
    seconds_between_failures: float,
) -> float:
    """Estimate the share of time lost to saves, restarts and half an interval per failure.

    >>> round(estimate_lost_share(200.0, 2.0, 0.0, 10_000.0), 3)
    0.02
    """
    return (
        save_seconds / interval_seconds
        + (interval_seconds / 2 + restart_seconds) / seconds_between_failures
    )
