"""Line charts of a report with their notes and tables."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardwright.report.axis_scale import format_axis_value, pad_range
from shardwright.report.downsampling import (
    FloatArray,
    compute_bin_means,
    smooth_values,
    thin_points,
)
from shardwright.report.line_chart import GREY, ChartFrame, Series, draw_curves
from shardwright.report.page_shell import Table
from shardwright.report.rank_panel import compute_mean_waits, find_wait_colour
from shardwright.report.recorded_run import Run
from shardwright.telemetry.event_log import ResumeEvent, StepEvent
from shardwright.telemetry.meter import STEP_PARTS
from shardwright.units import GIB_BYTES, MIB_BYTES

_MAX_TABLE_ROWS = 40
_MAX_LINES_PER_RUN = 6
_NUM_AREA_BUCKETS = 120


@dataclass(frozen=True)
class Chart:
    """One chart of the page, not yet drawn at the page's widths."""

    key: str
    title: str
    series: tuple[Series, ...]
    frame: ChartFrame
    table: Table
    note: str = ""
    """Explanation under the title."""
    is_wide: bool = False
    hover_series: tuple[Series, ...] = field(default=())
    """Series whose values the pointer shows; default the labelled series."""

    @property
    def readable_series(self) -> tuple[Series, ...]:
        """Series whose values the pointer shows."""
        return self.hover_series or tuple(s for s in self.series if s.is_labelled)


def build_charts(runs: Sequence[Run]) -> list[Chart]:
    """Build all charts that have data, in reading order."""
    axis = _Axis.choose(runs)
    charts = [
        _build_loss_chart(runs, axis),
        _build_value_chart(
            runs,
            axis,
            "gradient-norm",
            "Gradient norm",
            "global norm before clipping",
            lambda s: s.gradient_norm,
        ),
        _build_value_chart(
            runs,
            axis,
            "learning-rate",
            "Learning rate",
            "learning rate",
            lambda s: s.learning_rate,
            is_smoothed=False,
            should_start_at_zero=True,
        ),
        _build_value_chart(
            runs,
            axis,
            "throughput",
            "Throughput",
            "tokens per second, all ranks",
            lambda s: s.tokens_per_second,
            should_start_at_zero=True,
        ),
        _build_value_chart(
            runs,
            axis,
            "mfu",
            "MFU",
            "% of the measured matmul ceiling",
            _compute_mfu_percent,
            should_start_at_zero=True,
        ),
        _build_memory_chart(runs, axis),
        *(
            _build_wait_chart(run, axis, f"waits-{index}", is_single_run=len(runs) == 1)
            for index, run in enumerate(runs)
        ),
        _build_value_chart(
            runs,
            axis,
            "expert-load",
            "Busiest expert",
            "tokens / even share",
            lambda s: s.expert_load,
        ),
        _build_temperature_chart(runs, axis),
        *(
            _build_time_chart(run, axis, f"time-{index}", is_single_run=len(runs) == 1)
            for index, run in enumerate(runs)
        ),
        _build_value_chart(
            runs,
            axis,
            "loss-scale",
            "Loss scale",
            "fp16 loss scale",
            lambda s: s.loss_scale,
            is_smoothed=False,
        ),
    ]
    return [chart for chart in charts if any(np.isfinite(s.y).any() for s in chart.series)]


def draw_loss_chart(
    runs: Sequence[Run], *, title: str = "", width: int = 760, height: int = 380
) -> str:
    """Draw the loss chart as a standalone SVG file, for a README, a paper or a chat."""
    chart = _build_loss_chart(runs, _Axis.choose(runs))
    frame = replace(chart.frame, width=width, height=height, description=title or chart.title)
    return draw_curves(chart.series, frame, title=title, is_standalone=True)


@dataclass(frozen=True)
class _Axis:
    """The x axis of all charts: steps, or tokens if the runs' batches differ in tokens."""

    label: str
    is_by_tokens: bool

    @classmethod
    def choose(cls, runs: Sequence[Run]) -> _Axis:
        sizes = {run.start.global_batch_tokens for run in runs if run.start is not None}
        return cls("tokens seen", True) if len(sizes) > 1 else cls("step", False)

    def compute_step_positions(self, run: Run) -> FloatArray:
        return run.tokens_seen if self.is_by_tokens else run.step_numbers

    def compute_evaluation_positions(self, run: Run) -> FloatArray:
        tokens_per_step = run.steps[-1].tokens if self.is_by_tokens and run.steps else 1
        return np.array(
            [tokens_per_step * (e.step or 0) for e in run.evaluations], dtype=np.float64
        )


def _compute_mfu_percent(step: StepEvent) -> float | None:
    return None if step.mfu is None else 100 * step.mfu


def _build_loss_chart(runs: Sequence[Run], axis: _Axis) -> Chart:
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
    note += _format_clipped_note(clipped)
    resumed = (
        sorted({e.step or 0 for run in runs for e in run.log.filter_by_type(ResumeEvent)})
        if is_single_run
        else []
    )
    marks = tuple((float(step), "resumed") for step in resumed[:6]) if not axis.is_by_tokens else ()
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
    table = _build_table(
        axis,
        runs,
        [("training loss", lambda run: run.smooth_loss), ("validation loss", _align_validation)],
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


def _format_smoothing_note(runs: Sequence[Run]) -> str:
    width = max(run.smoothing_half_width for run in runs)
    return f"Bold: mean over {2 * width + 1:,} steps; faint: every step." if width else ""


def _format_clipped_note(num_clipped: int) -> str:
    return (
        f" {num_clipped:,} step{'s are' if num_clipped > 1 else ' is'} outside the chart."
        if num_clipped
        else ""
    )


def _align_validation(run: Run) -> FloatArray:
    losses = {e.step: e.loss for e in run.evaluations}
    return np.array([losses.get(step.step, math.nan) for step in run.steps])


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


def _build_value_chart(
    runs: Sequence[Run],
    axis: _Axis,
    key: str,
    title: str,
    label: str,
    value: Callable[[StepEvent], float | None],
    *,
    is_smoothed: bool = True,
    should_start_at_zero: bool = False,
) -> Chart:
    """Build a chart of one number per step with one curve per run."""
    raw = []
    lines = []
    for colour, run in enumerate(runs):
        x = axis.compute_step_positions(run)
        y = run.build_curve(value)
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
        y_range=y_range,
        rules=rules,
    )
    note = (
        _format_smoothing_note(runs) if is_smoothed else "At every step."
    ) + _format_clipped_note(clipped)
    table = _build_table(axis, runs, [(label, lambda run: run.build_curve(value))])
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


def _build_memory_chart(runs: Sequence[Run], axis: _Axis) -> Chart:
    """Build the chart of peak memory: all ranks, or the highest and lowest of many."""
    series: list[Series] = []
    largest = max((float(np.nanmax(run.memory)) for run in runs if run.memory.size), default=0.0)
    size, unit = (GIB_BYTES, "GiB") if largest >= GIB_BYTES else (MIB_BYTES, "MiB")
    for colour, run in enumerate(runs):
        table = run.memory / size
        x = axis.compute_step_positions(run)
        num_ranks = table.shape[1]
        if not num_ranks:
            continue
        if len(runs) > 1:
            series.append(Series(run.name, x, table.max(axis=1), colour))
        elif num_ranks <= _MAX_LINES_PER_RUN:
            series += [Series(f"rank {rank}", x, table[:, rank], rank) for rank in range(num_ranks)]
        else:
            series.append(Series(f"highest of {num_ranks} ranks", x, table.max(axis=1), 0))
            series.append(Series("lowest", x, table.min(axis=1), 2))
    subject = "Highest rank of each run" if len(runs) > 1 else "Each rank"
    note = f"{subject}: peak allocated memory on a GPU, resident memory on a CPU."
    frame = ChartFrame(
        x_label=axis.label, y_label=f"memory per rank, {unit}", should_start_at_zero=True
    )
    columns: list[tuple[str, Callable[[Run], FloatArray]]] = [
        (f"highest rank, {unit}", lambda run: _reduce_ranks(run, np.max) / size),
        (f"lowest rank, {unit}", lambda run: _reduce_ranks(run, np.min) / size),
    ]
    return Chart("memory", "Memory", tuple(series), frame, _build_table(axis, runs, columns), note)


def _reduce_ranks(run: Run, reduce: Callable[..., FloatArray]) -> FloatArray:
    return reduce(run.memory, axis=1) if run.memory.size else np.full(len(run.steps), np.nan)


def _build_time_chart(run: Run, axis: _Axis, key: str, *, is_single_run: bool) -> Chart:
    """Build the stacked chart of step time by part; the time outside all parts is `other`."""
    x = axis.compute_step_positions(run)
    total = run.build_curve(lambda step: step.step_seconds)
    parts = {
        part: run.build_curve(operator.attrgetter(f"{part}_seconds"))
        for part in STEP_PARTS
    }
    known = {
        part: np.nan_to_num(values) for part, values in parts.items() if np.isfinite(values).any()
    }
    # The first step compiles and fills caches: it would flatten all others.
    num_skipped = 1 if len(x) > 10 else 0
    top, num_beyond = _compute_area_top(total[num_skipped:])
    factor, unit = (1000.0, "ms") if top < 1 else (1.0, "s")
    stack: list[Series] = []
    if known:
        known["other"] = np.maximum(0.0, total - sum(known.values()))
        for colour, (part, values) in enumerate(known.items()):
            bx, by = compute_bin_means(
                x[num_skipped:], factor * values[num_skipped:], _NUM_AREA_BUCKETS
            )
            stack.append(Series(part, bx, by, GREY if part == "other" else colour, "area"))
    frame = ChartFrame(
        x_label=axis.label,
        y_label=f"{unit} per step",
        y_range=(0.0, 1.05 * factor * top) if top > 0 else None,
    )
    title = "Time per step" if is_single_run else f"Time per step: {run.name}"
    columns = [
        (f"{part}, ms", lambda run, values=values: 1000 * values) for part, values in known.items()
    ]
    table = _build_table(axis, [run], [*columns, ("whole step, ms", lambda run: 1000 * total)])
    note = (
        "On rank 0."
        + (" The first step is left out." if num_skipped else "")
        + _format_clipped_note(num_beyond)
    )
    return Chart(key, title, tuple(stack), frame, table, note)


def _compute_area_top(total: FloatArray) -> tuple[float, int]:
    """Return the highest drawn value of a stack, below outliers, and the number of outliers."""
    known = total[np.isfinite(total)]
    if not len(known):
        return 0.0, 0
    high = float(np.quantile(known, 0.99))
    highest = float(known.max())
    return (highest, 0) if highest <= 2 * high else (high, int((known > high).sum()))


def _build_wait_chart(run: Run, axis: _Axis, key: str, *, is_single_run: bool) -> Chart:
    """Build the stacked chart of waiting times by parallelism, as means over ranks."""
    waits = compute_mean_waits(run)
    x = np.array([event.step or 0 for event in run.ranks], dtype=np.float64)
    if axis.is_by_tokens and run.steps:
        x = x * run.steps[-1].tokens
    num_skipped = 1 if len(x) > 10 else 0  # the first step includes the setup of communication
    total = np.sum(list(waits.values()), axis=0) if waits else np.zeros(0)
    top, num_beyond = _compute_area_top(total[num_skipped:])
    stack = []
    for name, values in waits.items():
        bx, by = compute_bin_means(x[num_skipped:], 1000 * values[num_skipped:], _NUM_AREA_BUCKETS)
        stack.append(Series(name, bx, by, find_wait_colour(name), "area"))
    frame = ChartFrame(
        x_label=axis.label, y_label="ms per step", y_range=(0.0, 1050 * top) if top > 0 else None
    )
    indices: set[int] = (
        set(np.linspace(0, len(x) - 1, min(_MAX_TABLE_ROWS, len(x))).round().astype(int).tolist())
        if len(x)
        else set()
    )
    rows = tuple(
        (
            f"{x[index]:,.0f}",
            *(format_axis_value(1000 * float(values[index])) for values in waits.values()),
        )
        for index in sorted(indices)
    )
    table = Table((axis.label, *(f"{name}, ms" for name in waits)), rows)
    title = "Waiting for other ranks" if is_single_run else f"Waiting for other ranks: {run.name}"
    note = (
        "By kind of parallelism, mean over ranks."
        + (" The first step is left out." if num_skipped else "")
        + _format_clipped_note(num_beyond)
    )
    return Chart(key, title, tuple(stack), frame, table, note)


def _build_temperature_chart(runs: Sequence[Run], axis: _Axis) -> Chart:
    """Build the chart of each run's hottest device at the steps that record all ranks."""
    series = []
    rows = []
    num_throttled = 0
    for colour, run in enumerate(runs):
        events = [event for event in run.ranks if event.temperature_celsius]
        num_throttled += sum(any(event.throttled or ()) for event in events)
        x = np.array([event.step or 0 for event in events], dtype=np.float64)
        x = x * run.steps[-1].tokens if axis.is_by_tokens and run.steps else x
        y = np.array(
            [max(event.temperature_celsius or (0.0,)) for event in events], dtype=np.float64
        )
        series.append(
            Series(
                "hottest" if len(runs) == 1 else run.name, x, y, colour, is_labelled=len(runs) > 1
            )
        )
        for event in events[:: max(1, len(events) // _MAX_TABLE_ROWS)]:
            reasons = "; ".join(
                f"rank {rank}: {reason}"
                for rank, reason in enumerate(event.throttled or ())
                if reason
            )
            rows.append(
                (
                    run.name,
                    f"{event.step:,}",
                    f"{max(event.temperature_celsius or (0.0,)):.0f}",
                    reasons,
                )
            )
    note = "The hottest device."
    if num_throttled:
        note += f" Clocks were throttled at {num_throttled:,} of the recorded steps."
    frame = ChartFrame(x_label=axis.label, y_label="degrees Celsius")
    table = Table(("run", "step", "hottest, °C", "throttled"), tuple(rows))
    return Chart(
        "temperature", "Temperature", tuple(series), frame, table, note, hover_series=tuple(series)
    )


def _build_table(
    axis: _Axis, runs: Sequence[Run], columns: Sequence[tuple[str, Callable[[Run], FloatArray]]]
) -> Table:
    """Build a table with a column per run and value, and rows at steps of the longest run."""
    listed = [(run, name, values) for run in runs for name, values in columns if len(run.steps)]
    if not listed:
        return Table((axis.label,), ())
    curves = [(axis.compute_step_positions(run), values(run)) for run, _, values in listed]
    longest = max(runs, key=lambda run: len(run.steps))
    x = axis.compute_step_positions(longest)
    indices = set(
        np.unique(
            np.linspace(0, len(x) - 1, min(_MAX_TABLE_ROWS, len(x))).round().astype(int)
        ).tolist()
    )
    if any(
        name == "validation loss" for name, _ in columns
    ):  # few values, so each gets a row, up to a limit
        evaluated = [
            i for i, value in enumerate(_align_validation(longest)) if math.isfinite(value)
        ]
        indices |= set(
            evaluated[:: math.ceil(len(evaluated) / _MAX_TABLE_ROWS)] if evaluated else []
        )
    rows = []
    for index in sorted(indices):
        position = float(x[index])
        cells = [_find_value_at(position, *curve) for curve in curves]
        rows.append(
            (
                f"{position:,.0f}",
                *(format_axis_value(cell) if math.isfinite(cell) else "" for cell in cells),
            )
        )
    heads = [name if len(runs) == 1 else f"{run.name}: {name}" for run, name, _ in listed]
    note = (
        f"{len(rows)} of {len(x):,} steps; events.jsonl has all of them."
        if len(rows) < len(x)
        else ""
    )
    return Table((axis.label, *heads), tuple(rows), note)


def _find_value_at(position: float, x: FloatArray, y: FloatArray) -> float:
    """Return y at the last x up to `position`, NaN outside; batch sizes of runs may differ."""
    index = int(np.searchsorted(x, position, side="right")) - 1
    return float(y[index]) if index >= 0 and position <= x[-1] else math.nan


def thin_for_hover(series: Series, buckets: int = 150) -> Series:
    """Reduce a series to few points, because the page repeats them as numbers."""
    if series.style == "area":
        return series
    x, y = thin_points(series.x, series.y, buckets)
    return replace(series, x=x, y=y)
