"""Charts of the ranks' measurements: memory, time by part, waiting times, temperatures."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import numpy as np

from shardwright.report.axis_scale import format_axis_value
from shardwright.report.chart_data import (
    MAX_TABLE_ROWS,
    Chart,
    StepAxis,
    build_step_table,
    format_clipped_note,
)
from shardwright.report.downsampling import FloatArray, compute_bin_means
from shardwright.report.line_chart import GREY, ChartFrame, Series
from shardwright.report.page_shell import Table
from shardwright.report.rank_panel import compute_mean_waits, find_wait_colour
from shardwright.report.recorded_run import Run
from shardwright.telemetry.meter import STEP_PARTS
from shardwright.units import GIB_BYTES, MIB_BYTES

_MAX_LINES_PER_RUN = 6
_NUM_AREA_BUCKETS = 120


def build_memory_chart(runs: Sequence[Run], axis: StepAxis) -> Chart:
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
    return Chart(
        "memory", "Memory", tuple(series), frame, build_step_table(axis, runs, columns), note
    )


def _reduce_ranks(run: Run, reduce: Callable[..., FloatArray]) -> FloatArray:
    return reduce(run.memory, axis=1) if run.memory.size else np.full(len(run.steps), np.nan)


def build_time_chart(run: Run, axis: StepAxis, key: str, *, is_single_run: bool) -> Chart:
    """Build the stacked chart of step time by part; the time outside all parts is `other`."""
    x = axis.compute_step_positions(run)
    total = run.build_curve(lambda step: step.step_seconds)
    parts = {part: run.build_curve(operator.attrgetter(f"{part}_seconds")) for part in STEP_PARTS}
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
    table = build_step_table(axis, [run], [*columns, ("whole step, ms", lambda run: 1000 * total)])
    note = (
        "On rank 0."
        + (" The first step is left out." if num_skipped else "")
        + format_clipped_note(num_beyond)
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


def build_wait_chart(run: Run, axis: StepAxis, key: str, *, is_single_run: bool) -> Chart:
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
        set(np.linspace(0, len(x) - 1, min(MAX_TABLE_ROWS, len(x))).round().astype(int).tolist())
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
        + format_clipped_note(num_beyond)
    )
    return Chart(key, title, tuple(stack), frame, table, note)


def build_temperature_chart(runs: Sequence[Run], axis: StepAxis) -> Chart:
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
        for event in events[:: max(1, len(events) // MAX_TABLE_ROWS)]:
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
