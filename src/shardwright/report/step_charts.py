"""Charts of one number per step: loss, gradient norm, throughput and the like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.report.axis_scale import pad_range
from shardwright.report.chart_data import (
    Chart,
    StepAxis,
    align_validation,
    build_step_table,
    format_clipped_note,
)
from shardwright.report.downsampling import FloatArray, smooth_values
from shardwright.report.line_chart import ChartFrame, Series
from shardwright.report.recorded_run import Run
from shardwright.telemetry.event_log import ResumeEvent, StepEvent


@dataclass(frozen=True)
class AxisUnit:
    """Unit of a chart's values."""

    label: str
    size: float
    """One of the unit, in the unit of the events."""
    smallest: float
    """Least largest value, in the unit of the events, of charts in this unit."""


BYTE_UNITS = (AxisUnit("GB", 1e9, 1e9), AxisUnit("MB", 1e6, 1e6), AxisUnit("kB", 1e3, 0.0))
TIME_UNITS = (AxisUnit("s", 1.0, 1.0), AxisUnit("ms", 1e-3, 0.0))
SHARE_UNITS = (AxisUnit("% of elements", 0.01, 1e-3), AxisUnit("elements per million", 1e-6, 0.0))


def choose_unit(
    runs: Sequence[Run], value: Callable[[StepEvent], float | None], units: Sequence[AxisUnit]
) -> tuple[str, Callable[[StepEvent], float | None]]:
    """Choose the first unit, of descending ones, that is not too large for the values.

    Returns:
        The unit's label, and `value` in this unit.
    """
    largest = max((v for run in runs for s in run.steps if (v := value(s)) is not None), default=0)
    unit = next((unit for unit in units if largest >= unit.smallest), units[-1])

    def convert(step: StepEvent) -> float | None:
        found = value(step)
        return None if found is None else found / unit.size

    return unit.label, convert


def _list_resume_marks(run: Run) -> tuple[tuple[float, str], ...]:
    """Return the first steps at which the run resumed, with their label."""
    steps = sorted({event.step or 0 for event in run.log.filter_by_type(ResumeEvent)})
    return tuple((float(step), "resumed") for step in steps[:6])


def build_loss_chart(runs: Sequence[Run], axis: StepAxis) -> Chart:
    """Build the chart of training and validation losses."""
    is_single_run = len(runs) == 1
    raw = []
    lines = []
    points = []
    for colour, run in enumerate(runs):
        x = axis.compute_step_positions(run)
        raw.append(
            Series(f"{run.name}, every step", x, run.loss, colour, "faint", is_labelled=False)
        )
        lines.append(Series("training" if is_single_run else run.name, x, run.smooth_loss, colour))
        if run.evaluations:
            loss = np.array([e.loss for e in run.evaluations])
            name = "validation" if is_single_run else f"{run.name}, validation"
            colour = 1 if is_single_run else colour
            points.append(
                Series(
                    name,
                    axis.compute_evaluation_positions(run),
                    loss,
                    colour,
                    "dots",
                    is_labelled=is_single_run,
                )
            )
    y_range, clipped = _compute_robust_range(lines + points, raw)
    width = max(run.smoothing_half_width for run in runs)
    note = "Mean over the supervised tokens of the batch." + (
        f" Bold: mean over {2 * width + 1:,} steps; faint: every step." if width else ""
    )
    note += " Dots: validation." if points else ""
    note += format_clipped_note(clipped)
    marks = _list_resume_marks(runs[0]) if is_single_run and not axis.is_by_tokens else ()
    # The loss falls far in the first steps; if that would flatten the rest, the scale is
    # logarithmic.
    is_log = y_range is not None and 0 < 3 * y_range[0] < y_range[1]
    frame = ChartFrame(
        x_label=axis.label,
        y_label="loss, nats per token",
        is_y_log=is_log,
        y_range=y_range,
        marks=marks,
    )
    table = build_step_table(
        axis,
        runs,
        [("training loss", lambda run: run.smooth_loss), ("validation loss", align_validation)],
    )
    return Chart(
        "loss",
        "Loss",
        (*raw, *points, *lines),
        frame,
        table,
        note,
        is_wide=True,
        hover_series=(*lines, *points),
    )


def _format_smoothing_note(runs: Sequence[Run], *, is_sparse: bool) -> str:
    width = max(run.smoothing_half_width for run in runs)
    step = "recorded step" if is_sparse else "step"
    return f"Bold: mean over {2 * width + 1:,} {step}s; faint: every {step}." if width else ""


def _is_sparse(values: FloatArray) -> bool:
    """Return True for values that only every `run.log_every_steps`-th step has."""
    return 0 < int(np.isfinite(values).sum()) < 0.6 * len(values)


def _read_curve(
    run: Run, axis: StepAxis, value: Callable[[StepEvent], float | None]
) -> tuple[FloatArray, FloatArray]:
    """Return positions and values of all steps; of the recorded ones, if the values are sparse.

    A mean over neighbouring steps would otherwise be that of one value.
    """
    x = axis.compute_step_positions(run)
    y = run.build_curve(value)
    is_shown = np.isfinite(y) if _is_sparse(y) else np.full(len(y), True)
    return x[is_shown], y[is_shown]


def _compute_robust_range(
    lines: list[Series], raw: list[Series]
) -> tuple[tuple[float, float] | None, int]:
    """Return a range that outliers do not stretch, and the number of points outside it."""
    inner = [s.y[np.isfinite(s.y)] for s in lines]
    outer = [s.y[np.isfinite(s.y)] for s in raw]
    inner, outer = [y for y in inner if len(y)], [y for y in outer if len(y)]
    if not inner or not outer:
        return None, 0
    low = min(min(y.min() for y in inner), min(float(np.quantile(y, 0.002)) for y in outer))
    high = max(max(y.max() for y in inner), max(float(np.quantile(y, 0.998)) for y in outer))
    if high <= low:
        return None, 0
    low, high = pad_range(float(low), float(high), is_log=0 < 3 * low < high)
    return (low, high), int(sum(((y < low) | (y > high)).sum() for y in outer))


def build_value_chart(
    runs: Sequence[Run],
    axis: StepAxis,
    key: str,
    title: str,
    label: str,
    value: Callable[[StepEvent], float | None],
    *,
    is_smoothed: bool = True,
    should_start_at_zero: bool = False,
    is_whole: bool = False,
) -> Chart:
    """Build a chart of one number per step with one curve per run; `is_whole` is for counts."""
    raw = []
    lines = []
    is_sparse = any(_is_sparse(run.build_curve(value)) for run in runs)
    for colour, run in enumerate(runs):
        x, y = _read_curve(run, axis, value)
        half_width = run.smoothing_half_width if is_smoothed else 0
        if half_width:
            raw.append(Series(f"{run.name}, every step", x, y, colour, "faint", is_labelled=False))
        lines.append(
            Series(run.name, x, smooth_values(y, half_width), colour, is_labelled=len(runs) > 1)
        )
    y_range, clipped = _compute_robust_range(lines, raw)
    spans = [s.y[np.isfinite(s.y) & (s.y > 0)] for s in lines]
    spans = [y for y in spans if len(y)]
    is_log = (
        not should_start_at_zero
        and bool(spans)
        and max(y.max() for y in spans) > 30 * min(y.min() for y in spans)
    )
    if is_log:
        y_range = None
        clipped = 0
    elif should_start_at_zero and y_range is not None:
        y_range = (0.0, y_range[1])
    rules: tuple[tuple[float, str], ...] = ()
    if key == "gradient-norm":
        limits = {limit for run in runs if (limit := _read_clip_norm(run)) is not None}
        rules = (
            tuple((limit, f"clipped to {limit:g}") for limit in limits) if len(limits) == 1 else ()
        )
    predicted = [_find_predicted(run, key) for run in runs]
    if any(value is not None for value in predicted):
        rules = tuple(
            (value, "predicted" if len(runs) == 1 else f"predicted: {run.name}")
            for run, value in zip(runs, predicted, strict=True)
            if value is not None
        )
        if y_range is not None:
            y_range = (
                min(y_range[0], *(v for v, _ in rules)),
                max(y_range[1], *(1.05 * v for v, _ in rules)),
            )
    frame = ChartFrame(
        x_label=axis.label,
        y_label=label,
        is_y_log=is_log,
        should_start_at_zero=should_start_at_zero,
        is_y_whole=is_whole,
        y_range=y_range,
        rules=rules,
    )
    note = (
        _format_smoothing_note(runs, is_sparse=is_sparse) if is_smoothed else "At every step."
    ) + format_clipped_note(clipped)
    table = build_step_table(axis, runs, [(label, lambda run: run.build_curve(value))])
    return Chart(key, title, (*raw, *lines), frame, table, note, hover_series=tuple(lines))


def _find_predicted(run: Run, key: str) -> float | None:
    """Return the planner's throughput or MFU, relative to the run's measured ceiling."""
    tokens = run.prediction.get("tokens_per_second")
    if not isinstance(tokens, int | float) or key not in ("throughput", "mfu"):
        return None
    if key == "throughput":
        return float(tokens)
    start = run.start
    if start is None or not start.flops_per_token or not start.matmul_flops_per_second:
        return None
    return 100 * tokens * start.flops_per_token / (start.world_size * start.matmul_flops_per_second)


def _read_clip_norm(run: Run) -> float | None:
    training = (run.start.recipe.get("training") or {}) if run.start else {}
    limit = training.get("max_grad_norm") if isinstance(training, dict) else None
    return float(limit) if isinstance(limit, int | float) else None
