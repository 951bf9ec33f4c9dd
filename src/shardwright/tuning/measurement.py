"""Measured steps of one trial, and the outcome of a trial."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from statistics import median
from typing import Any, Literal

from shardwright.telemetry.event_log import StepEvent

WARMUP_STEPS = 2
"""First steps of a trial, which are not measured: kernels are compiled and memory grows."""
MIN_RELATIVE_SPREAD = 0.01
"""Lower bound of a spread, as a share of the median. Two runs of the same settings differ by more
than the steps of one run suggest."""
SHORT_TRIAL_SPREAD = 0.08
"""Added to it, divided by the number of steps: the deviation of three or four steps may be small by
chance."""

_MEDIAN_FACTOR = 1.253 * 1.4826 * 1.645
"""Half-width of a median's 90% interval times sqrt(n), in median absolute deviations of normally
distributed values: the median's standard error is 1.253 standard deviations / sqrt(n), and a
standard deviation is 1.4826 median absolute deviations."""

TrialStatus = Literal["measured", "out_of_memory", "failed", "refused", "time_limit"]
"""`refused`: the settings are not possible for this model; `time_limit`: the trial took longer
than a trial may take."""


@dataclass(frozen=True)
class Measurement:
    """Steps of one trial after its warm-up."""

    num_steps: int
    step_seconds: float
    """Median."""
    spread_seconds: float
    """Half-width of the median's 90% interval, with a lower bound."""
    tokens_per_second: float
    """Tokens of all ranks per second, padding included."""
    memory_bytes: int
    """Peak of the rank with the most: allocated on CUDA, resident on a CPU."""
    warmup_seconds: float
    """Time of the warm-up steps beyond that of as many measured ones: mostly compilation."""
    setup_seconds: float
    """Time of the trial without its steps: start of the processes, data, model."""

    @property
    def low(self) -> float:
        """Low end of the step's interval in seconds."""
        return self.step_seconds - self.spread_seconds

    @property
    def high(self) -> float:
        """High end of the step's interval in seconds."""
        return self.step_seconds + self.spread_seconds


@dataclass(frozen=True)
class TrialOutcome:
    """Outcome of one trial. `measurement` is None unless `status` is `measured`."""

    status: TrialStatus
    seconds: float
    """Duration of the whole trial."""
    measurement: Measurement | None = None
    reason: str = ""
    """Reason why nothing was measured."""
    measured_at: str | None = None
    """Time at which the measurement ended, in UTC. None without one, and in files of earlier
    versions."""

    def __post_init__(self) -> None:
        assert (self.status == "measured") == (self.measurement is not None), self.status

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome as a JSON object."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> TrialOutcome:
        """Build the outcome from a JSON object."""
        measured = content["measurement"]
        return cls(
            **content | {"measurement": None if measured is None else Measurement(**measured)}
        )


def format_current_time() -> str:
    """Format the time of a measurement that has just ended, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def measure_steps(
    events: Sequence[StepEvent], num_steps: int, total_seconds: float
) -> Measurement | None:
    """Measure the steps of a finished trial; None if it has too few.

    Args:
        events: Step events, the warm-up steps first.
        num_steps: Number of steps to measure.
        total_seconds: Duration of the whole trial.
    """
    if len(events) != WARMUP_STEPS + num_steps:
        return None
    warmup = [event.step_seconds for event in events[:WARMUP_STEPS]]
    measured = events[WARMUP_STEPS:]
    seconds = [event.step_seconds for event in measured]
    middle = median(seconds)
    deviation = median(abs(value - middle) for value in seconds)
    spread = _MEDIAN_FACTOR * deviation / sqrt(num_steps)
    return Measurement(
        num_steps,
        middle,
        max(spread, (MIN_RELATIVE_SPREAD + SHORT_TRIAL_SPREAD / num_steps) * middle),
        median(event.tokens for event in measured) / middle,
        max((max(event.memory_bytes, default=0) for event in measured), default=0),
        max(0.0, sum(warmup) - WARMUP_STEPS * middle),
        max(0.0, total_seconds - sum(warmup) - sum(seconds)),
    )
