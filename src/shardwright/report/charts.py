"""List of the line charts of a report, in reading order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import get_args

import numpy as np

from shardwright.config.low_precision import LowPrecisionTarget
from shardwright.report.chart_data import Chart, StepAxis
from shardwright.report.rank_charts import (
    build_memory_chart,
    build_temperature_chart,
    build_time_chart,
    build_wait_chart,
)
from shardwright.report.recorded_run import Run
from shardwright.report.step_charts import (
    BYTE_UNITS,
    SHARE_UNITS,
    TIME_UNITS,
    build_loss_chart,
    build_value_chart,
    choose_unit,
)
from shardwright.telemetry.event_log import StepEvent


def build_charts(runs: Sequence[Run]) -> list[Chart]:
    """Build all charts that have data, in reading order."""
    axis = StepAxis.choose(runs)
    build_curves = partial(build_value_chart, runs, axis)
    build_curves_from_zero = partial(build_curves, should_start_at_zero=True)
    charts = [
        build_loss_chart(runs, axis),
        *_build_reward_charts(build_curves),
        build_curves(
            "gradient-norm",
            "Gradient norm",
            "global norm before clipping",
            lambda s: s.gradient_norm,
        ),
        build_curves_from_zero(
            "learning-rate",
            "Learning rate",
            "learning rate",
            lambda s: s.learning_rate,
            is_smoothed=False,
        ),
        build_curves_from_zero(
            "throughput",
            "Throughput",
            "tokens per second, all ranks",
            lambda s: s.tokens_per_second,
        ),
        build_curves_from_zero(
            "mfu",
            "MFU",
            "% of the measured matmul ceiling",
            lambda s: None if s.mfu is None else 100 * s.mfu,
        ),
        build_memory_chart(runs, axis),
        *(
            build_wait_chart(run, axis, f"waits-{index}", is_single_run=len(runs) == 1)
            for index, run in enumerate(runs)
        ),
        build_curves(
            "expert-load", "Busiest expert", "tokens / even share", lambda s: s.expert_load
        ),
        *_build_rounding_charts(runs, axis),
        *_build_offload_charts(runs, build_curves_from_zero),
        build_temperature_chart(runs, axis),
        *(
            build_time_chart(run, axis, f"time-{index}", is_single_run=len(runs) == 1)
            for index, run in enumerate(runs)
        ),
        build_curves(
            "loss-scale", "Loss scale", "fp16 loss scale", lambda s: s.loss_scale, is_smoothed=False
        ),
    ]
    return [chart for chart in charts if any(np.isfinite(s.y).any() for s in chart.series)]


def _build_reward_charts(build_curves: Callable[..., Chart]) -> list[Chart]:
    """Build charts of the rewards of preference tuning."""
    return [
        build_curves(
            "reward-margin",
            "Reward margin",
            "reward of the chosen response - that of the rejected one",
            lambda s: s.reward_margin,
        ),
        build_curves(
            "reward-accuracy",
            "Reward accuracy",
            "% of pairs whose chosen response has the higher reward",
            lambda s: None if s.reward_accuracy is None else 100 * s.reward_accuracy,
            should_start_at_zero=True,
        ),
    ]


def _build_offload_charts(runs: Sequence[Run], build_curves: Callable[..., Chart]) -> list[Chart]:
    """Build charts of the bytes that offloading moves, and of the time it waits for them."""
    charts = []
    for name, subject in (
        ("offload", "offloaded states"),
        ("activation", "saved tensors"),
        ("parameter", "weights"),
    ):
        read, written, waiting = (
            attrgetter(f"{name}_{field}")
            for field in ("read_bytes", "written_bytes", "waiting_seconds")
        )
        unit, moved = choose_unit(runs, partial(_sum_bytes, read, written), BYTE_UNITS)
        time_unit, waited = choose_unit(runs, waiting, TIME_UNITS)
        charts += [
            build_curves(
                f"{name}-bytes", f"Transfers of {subject}", f"{unit} per step on rank 0", moved
            ),
            build_curves(
                f"{name}-waiting",
                f"Waiting for {subject}",
                f"{time_unit} per step on rank 0",
                waited,
            ),
        ]
    return charts


def _sum_bytes(
    read: Callable[[StepEvent], int | None],
    written: Callable[[StepEvent], int | None],
    step: StepEvent,
) -> int | None:
    """Return the bytes that a step moved; frozen weights are not written."""
    read_bytes = read(step)
    return None if read_bytes is None else read_bytes + (written(step) or 0)


def _build_rounding_charts(runs: Sequence[Run], axis: StepAxis) -> list[Chart]:
    """Build charts of the quantised operands that rounding changed, for every kind of layer."""

    def read_flushed(kind: str, step: StepEvent) -> float | None:
        return (step.fp8_flushed or {}).get(kind)

    def read_saturated(kind: str, step: StepEvent) -> float | None:
        return (step.fp8_saturated or {}).get(kind)

    def read_nonfinite(kind: str, step: StepEvent) -> float | None:
        return (step.fp8_nonfinite or {}).get(kind)

    build_curves = partial(build_value_chart, runs, axis, should_start_at_zero=True)
    return [
        chart
        for kind in get_args(LowPrecisionTarget)
        for chart in (
            build_curves(
                f"fp8-flushed-{kind}",
                f"Quantised operands rounded to zero: {kind}",
                *choose_unit(runs, partial(read_flushed, kind), SHARE_UNITS),
            ),
            build_curves(
                f"fp8-saturated-{kind}",
                f"Saturated quantised operands: {kind}",
                "elements, all ranks",
                partial(read_saturated, kind),
                is_whole=True,
            ),
            build_curves(
                f"fp8-nonfinite-{kind}",
                f"Infinite or NaN operands before quantisation: {kind}",
                "elements, all ranks",
                partial(read_nonfinite, kind),
                is_whole=True,
            ),
        )
    ]
