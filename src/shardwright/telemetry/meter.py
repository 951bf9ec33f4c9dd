"""Throughput of a run, with MFU relative to the measured ceiling, and its progress."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

from shardwright.telemetry.event_log import Event, RunStartedEvent, StepEvent
from shardwright.units import format_flops_per_second

logger = logging.getLogger(__name__)

STEP_PARTS = ("data", "forward", "backward", "waiting", "reduction", "optimizer")
"""Parts of a step; each has a field `<part>_seconds` in the `step` event."""


@dataclass(frozen=True)
class Throughput:
    """Rates of all ranks together, with the fields of a `step` event."""

    tokens_per_second: float
    model_flops_per_second: float | None
    mfu: float | None


def measure_throughput(
    tokens: int,
    seconds: float,
    *,
    world_size: int,
    flops_per_token: float | None,
    matmul_flops_per_second: float | None,
) -> Throughput:
    """Compute tokens/s, model FLOP/s and MFU of a step.

    MFU is relative to `world_size` times the matmul ceiling of one device. Model FLOPs are
    those of forward and backward pass without recomputation (PaLM, appendix B).

    >>> rates = measure_throughput(
    ...     1000, 2.0, world_size=2, flops_per_token=6e6, matmul_flops_per_second=1e10
    ... )
    >>> rates.mfu
    0.15
    """
    tokens_per_second = tokens / seconds if seconds > 0 else 0.0
    flops = tokens_per_second * flops_per_token if flops_per_token is not None else None
    mfu = (
        flops / (world_size * matmul_flops_per_second)
        if flops is not None and matmul_flops_per_second
        else None
    )
    return Throughput(tokens_per_second, flops, mfu)


class ThroughputMeter:
    """Meter of a run's throughput.

    The ceiling stays as measured, so that all steps of a run have one denominator. A step above it
    shows that it was measured too low: its MFU counts as 1, and the first time is logged.
    """

    def __init__(self, world_size: int, matmul_flops_per_second: float) -> None:
        self._matmul_flops_per_second = matmul_flops_per_second
        self._world_size = world_size
        self._has_warned = False

    def measure(self, tokens: int, seconds: float, flops_per_token: float) -> Throughput:
        """Compute the rates of a step of all ranks."""
        throughput = measure_throughput(
            tokens,
            seconds,
            world_size=self._world_size,
            flops_per_token=flops_per_token,
            matmul_flops_per_second=self._matmul_flops_per_second,
        )
        if throughput.mfu is None or throughput.mfu <= 1.0:
            return throughput
        if not self._has_warned:
            logger.warning(
                "a step reached %.0f%% of the measured matmul ceiling (%s per device), "
                "which is too low (busy machine?): MFU is too high in the whole run, and shown as "
                "100%% at most",
                100.0 * throughput.mfu,
                format_flops_per_second(self._matmul_flops_per_second),
            )
            self._has_warned = True
        return replace(throughput, mfu=1.0)


class ExponentialMean:
    """Exponential mean without bias towards zero at the start; ignores non-finite values.

    >>> mean = ExponentialMean(half_life=1)
    >>> [round(mean.add(value), 3) for value in (4.0, 4.0, 1.0)]
    [4.0, 4.0, 2.286]
    """

    def __init__(self, half_life: float) -> None:
        self._decay = 0.5 ** (1.0 / half_life)
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float) -> float:
        """Add a value and return the mean."""
        if math.isfinite(value):
            self._sum = self._decay * self._sum + (1 - self._decay) * value
            self._weight = self._decay * self._weight + (1 - self._decay)
        return self.value

    @property
    def value(self) -> float:
        """The mean; NaN before the first finite value."""
        return self._sum / self._weight if self._weight else math.nan


class RunProgress:
    """Smoothed metrics for display, computed from the events.

    The time left is the number of remaining steps times the smoothed step time, increased by
    the share of time spent in evaluations and checkpoints; the first step of a process
    (compilation, caches) is ignored.
    """

    def __init__(self) -> None:
        self.step = 0
        self.total_steps = 0
        self._loss = ExponentialMean(10)
        self._tokens_per_second = ExponentialMean(10)
        self._mfu = ExponentialMean(10)
        self._step_seconds = ExponentialMean(10)
        self._num_process_steps = 0
        self._first_tokens_per_second = math.nan
        self._origin_seconds = 0.0
        self._total_step_seconds = 0.0
        self._overhead_factor = 1.0

    def on_event(self, event: Event) -> None:
        """Update the metrics with an event."""
        if isinstance(event, RunStartedEvent):
            self.total_steps = event.total_steps
            self._num_process_steps = 0
        if event.step is not None:
            self.step = event.step
        if not isinstance(event, StepEvent):
            return
        self._num_process_steps += 1
        self._loss.add(event.loss)
        if self._num_process_steps == 1:
            self._origin_seconds = event.elapsed_seconds
            self._total_step_seconds = 0.0
            self._first_tokens_per_second = event.tokens_per_second
            return
        self._total_step_seconds += event.step_seconds
        self._step_seconds.add(event.step_seconds)
        self._tokens_per_second.add(event.tokens_per_second)
        if event.mfu is not None:
            self._mfu.add(event.mfu)
        if self._total_step_seconds > 0:
            self._overhead_factor = max(
                1.0, (event.elapsed_seconds - self._origin_seconds) / self._total_step_seconds
            )

    @property
    def loss(self) -> float:
        """Training loss, exponential mean with a half-life of ten steps."""
        return self._loss.value

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        return (
            self._tokens_per_second.value
            if self._num_process_steps > 1
            else self._first_tokens_per_second
        )

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, 0 to 1; NaN if unknown."""
        return self._mfu.value

    @property
    def remaining_seconds(self) -> float:
        """Estimated seconds until the last step; NaN before two steps are done."""
        return (
            max(0, self.total_steps - self.step) * self._step_seconds.value * self._overhead_factor
        )
