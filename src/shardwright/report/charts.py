"""Line charts of a report with their notes and tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardwright.report.plot import GREY, Frame, Series, svg_curves
from shardwright.report.ranks import colour_of_cut, waits_over_steps
from shardwright.report.runs import Run
from shardwright.report.scale import pad_range, write_value
from shardwright.report.shell import Table
from shardwright.report.thin import Floats, bin_means, smooth, thin
from shardwright.telemetry.events import Resumed, Step
from shardwright.telemetry.meter import PARTS
from shardwright.units import GIB_BYTES, MIB_BYTES

_TABLE_ROWS = 40
_MAX_LINES_PER_RUN = 6
_AREA_BUCKETS = 120


@dataclass(frozen=True)
class Chart:
    """One chart of the page, not yet drawn at the page's widths."""

    key: str
    title: str
    series: tuple[Series, ...]
    frame: Frame
    table: Table
    note: str = ""
    """Explanation under the title."""
    wide: bool = False
    hover: tuple[Series, ...] = field(default=())
    """Series whose values the pointer shows; default the labelled series."""

    @property
    def readable(self) -> tuple[Series, ...]:
        """Series whose values the pointer shows."""
        return self.hover or tuple(s for s in self.series if s.labelled)


def build_charts(runs: Sequence[Run]) -> list[Chart]:
    """Build all charts that have data, in reading order."""
    axis = _Axis.of(runs)
    charts = [
        _chart_loss(runs, axis),
        _chart_value(runs, axis, "gradient-norm", "Gradient norm", "global norm before clipping", lambda s: s.gradient_norm),
        _chart_value(
            runs, axis, "learning-rate", "Learning rate", "learning rate", lambda s: s.learning_rate, smoothed=False, from_zero=True
        ),
        _chart_value(
            runs, axis, "throughput", "Throughput", "tokens per second, all ranks", lambda s: s.tokens_per_second, from_zero=True
        ),
        _chart_value(runs, axis, "mfu", "MFU", "% of the measured matmul ceiling", _mfu_percent, from_zero=True),
        _chart_memory(runs, axis),
        *(_chart_waits(run, axis, f"waits-{index}", alone=len(runs) == 1) for index, run in enumerate(runs)),
        _chart_value(runs, axis, "expert-load", "Busiest expert", "tokens / even share", lambda s: s.expert_load),
        _chart_temperature(runs, axis),
        *(_chart_time(run, axis, f"time-{index}", alone=len(runs) == 1) for index, run in enumerate(runs)),
        _chart_value(runs, axis, "loss-scale", "Loss scale", "fp16 loss scale", lambda s: s.loss_scale, smoothed=False),
    ]
    return [chart for chart in charts if any(np.isfinite(s.y).any() for s in chart.series)]


def svg_loss(runs: Sequence[Run], *, title: str = "", width: int = 760, height: int = 380) -> str:
    """Draw the loss chart as a standalone SVG file, for a README, a paper or a chat."""
    chart = _chart_loss(runs, _Axis.of(runs))
    frame = replace(chart.frame, width=width, height=height, description=title or chart.title)
    return svg_curves(chart.series, frame, title=title, standalone=True)


@dataclass(frozen=True)
class _Axis:
    """The x axis of all charts: steps, or tokens if the runs' batches differ in tokens."""

    label: str
    by_tokens: bool

    @classmethod
    def of(cls, runs: Sequence[Run]) -> _Axis:
        sizes = {run.start.global_batch_tokens for run in runs if run.start is not None}
        return cls("tokens seen", True) if len(sizes) > 1 else cls("step", False)

    def of_steps(self, run: Run) -> Floats:
        return run.tokens_seen if self.by_tokens else run.step_numbers

    def of_evaluations(self, run: Run) -> Floats:
        tokens_per_step = run.steps[-1].tokens if self.by_tokens and run.steps else 1
        return np.array([tokens_per_step * (e.step or 0) for e in run.evaluations], dtype=np.float64)


def _mfu_percent(step: Step) -> float | None:
    return None if step.mfu is None else 100 * step.mfu


def _chart_loss(runs: Sequence[Run], axis: _Axis) -> Chart:
    is_single_run = len(runs) == 1
    raw = []
    lines = []
    points = []
    for colour, run in enumerate(runs):
        x = axis.of_steps(run)
        raw.append(Series(f"{run.name}, every step", x, run.loss, colour, "faint", labelled=False))
        lines.append(Series("training" if is_single_run else run.name, x, run.smooth_loss, colour))
        if run.evaluations:
            loss = np.array([e.loss for e in run.evaluations])
            name = "validation" if is_single_run else f"{run.name}, validation"
            colour = 1 if is_single_run else colour
            points.append(Series(name, axis.of_evaluations(run), loss, colour, "dots", labelled=is_single_run))
    y_range, clipped = _robust_range(lines + points, raw)
    width = max(run.smoothing for run in runs)
    note = "Mean over the supervised tokens of the batch." + (
        f" Bold: mean over {2 * width + 1:,} steps; faint: every step." if width else ""
    )
    note += " Dots: validation." if points else ""
    note += _outside(clipped)
    resumed = sorted({e.step or 0 for run in runs for e in run.log.of(Resumed)}) if is_single_run else []
    marks = tuple((float(step), "resumed") for step in resumed[:6]) if not axis.by_tokens else ()
    # The loss falls far in the first steps; if that would flatten the rest, the scale is
    # logarithmic.
    is_log = y_range is not None and 0 < 3 * y_range[0] < y_range[1]
    frame = Frame(x_label=axis.label, y_label="loss, nats per token", y_log=is_log, y_range=y_range, marks=marks)
    table = _tabulate(axis, runs, [("training loss", lambda run: run.smooth_loss), ("validation loss", _validation_at_steps)])
    return Chart("loss", "Loss", (*raw, *points, *lines), frame, table, note, wide=True, hover=(*lines, *points))


def _smoothing_note(runs: Sequence[Run]) -> str:
    width = max(run.smoothing for run in runs)
    return f"Bold: mean over {2 * width + 1:,} steps; faint: every step." if width else ""


def _outside(clipped: int) -> str:
    return f" {clipped:,} step{'s are' if clipped > 1 else ' is'} outside the chart." if clipped else ""


def _validation_at_steps(run: Run) -> Floats:
    losses = {e.step: e.loss for e in run.evaluations}
    return np.array([losses.get(step.step, math.nan) for step in run.steps])


def _robust_range(lines: list[Series], raw: list[Series]) -> tuple[tuple[float, float] | None, int]:
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
    low, high = pad_range(float(low), float(high), log=0 < 3 * low < high)
    return (low, high), int(sum(((y < low) | (y > high)).sum() for y in outer))


def _chart_value(
    runs: Sequence[Run],
    axis: _Axis,
    key: str,
    title: str,
    label: str,
    value: Callable[[Step], float | None],
    *,
    smoothed: bool = True,
    from_zero: bool = False,
) -> Chart:
    """Build a chart of one number per step with one curve per run."""
    raw = []
    lines = []
    for colour, run in enumerate(runs):
        x = axis.of_steps(run)
        y = run.curve(value)
        half_width = run.smoothing if smoothed else 0
        if half_width:
            raw.append(Series(f"{run.name}, every step", x, y, colour, "faint", labelled=False))
        lines.append(Series(run.name, x, smooth(y, half_width), colour, labelled=len(runs) > 1))
    y_range, clipped = _robust_range(lines, raw)
    spans = [s.y[np.isfinite(s.y) & (s.y > 0)] for s in lines]
    spans = [y for y in spans if len(y)]
    is_log = not from_zero and bool(spans) and max(y.max() for y in spans) > 30 * min(y.min() for y in spans)
    if is_log:
        y_range = None
        clipped = 0
    elif from_zero and y_range is not None:
        y_range = (0.0, y_range[1])
    rules: tuple[tuple[float, str], ...] = ()
    if key == "gradient-norm":
        limits = {limit for run in runs if (limit := _clip_norm(run)) is not None}
        rules = tuple((limit, f"clipped to {limit:g}") for limit in limits) if len(limits) == 1 else ()
    predicted = [_predicted(run, key) for run in runs]
    if any(value is not None for value in predicted):
        rules = tuple(
            (value, "predicted" if len(runs) == 1 else f"predicted: {run.name}")
            for run, value in zip(runs, predicted, strict=True)
            if value is not None
        )
        if y_range is not None:
            y_range = (min(y_range[0], *(v for v, _ in rules)), max(y_range[1], *(1.05 * v for v, _ in rules)))
    frame = Frame(x_label=axis.label, y_label=label, y_log=is_log, y_from_zero=from_zero, y_range=y_range, rules=rules)
    note = (_smoothing_note(runs) if smoothed else "At every step.") + _outside(clipped)
    table = _tabulate(axis, runs, [(label, lambda run: run.curve(value))])
    return Chart(key, title, (*raw, *lines), frame, table, note, hover=tuple(lines))


def _predicted(run: Run, key: str) -> float | None:
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


def _clip_norm(run: Run) -> float | None:
    training = (run.start.recipe.get("training") or {}) if run.start else {}
    limit = training.get("max_grad_norm") if isinstance(training, dict) else None
    return float(limit) if isinstance(limit, int | float) else None


def _chart_memory(runs: Sequence[Run], axis: _Axis) -> Chart:
    """Build the chart of peak memory: all ranks, or the highest and lowest of many."""
    series: list[Series] = []
    largest = max((float(np.nanmax(run.memory)) for run in runs if run.memory.size), default=0.0)
    size, unit = (GIB_BYTES, "GiB") if largest >= GIB_BYTES else (MIB_BYTES, "MiB")
    for colour, run in enumerate(runs):
        table = run.memory / size
        x = axis.of_steps(run)
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
    frame = Frame(x_label=axis.label, y_label=f"memory per rank, {unit}", y_from_zero=True)
    columns: list[tuple[str, Callable[[Run], Floats]]] = [
        (f"highest rank, {unit}", lambda run: _per_rank(run, np.max) / size),
        (f"lowest rank, {unit}", lambda run: _per_rank(run, np.min) / size),
    ]
    return Chart("memory", "Memory", tuple(series), frame, _tabulate(axis, runs, columns), note)


def _per_rank(run: Run, reduce: Callable[..., Floats]) -> Floats:
    return reduce(run.memory, axis=1) if run.memory.size else np.full(len(run.steps), np.nan)


def _chart_time(run: Run, axis: _Axis, key: str, *, alone: bool) -> Chart:
    """Build the stacked chart of step time by part; the time outside all parts is `other`."""
    x = axis.of_steps(run)
    total = run.curve(lambda step: step.step_seconds)
    parts = {part: run.curve(lambda step, part=part: getattr(step, f"{part}_seconds")) for part in PARTS}  # type: ignore[misc]
    known = {part: np.nan_to_num(values) for part, values in parts.items() if np.isfinite(values).any()}
    # The first step compiles and fills caches: it would flatten all others.
    num_skipped = 1 if len(x) > 10 else 0
    top, num_beyond = _top_of_areas(total[num_skipped:])
    factor, unit = (1000.0, "ms") if top < 1 else (1.0, "s")
    stack: list[Series] = []
    if known:
        known["other"] = np.maximum(0.0, total - sum(known.values()))
        for colour, (part, values) in enumerate(known.items()):
            bx, by = bin_means(x[num_skipped:], factor * values[num_skipped:], _AREA_BUCKETS)
            stack.append(Series(part, bx, by, GREY if part == "other" else colour, "area"))
    frame = Frame(x_label=axis.label, y_label=f"{unit} per step", y_range=(0.0, 1.05 * factor * top) if top > 0 else None)
    title = "Time per step" if alone else f"Time per step: {run.name}"
    columns = [(f"{part}, ms", lambda run, values=values: 1000 * values) for part, values in known.items()]
    table = _tabulate(axis, [run], [*columns, ("whole step, ms", lambda run: 1000 * total)])
    note = "On rank 0." + (" The first step is left out." if num_skipped else "") + _outside(num_beyond)
    return Chart(key, title, tuple(stack), frame, table, note)


def _top_of_areas(total: Floats) -> tuple[float, int]:
    """Return the highest drawn value of a stack, below outliers, and the number of outliers."""
    known = total[np.isfinite(total)]
    if not len(known):
        return 0.0, 0
    high = float(np.quantile(known, 0.99))
    highest = float(known.max())
    return (highest, 0) if highest <= 2 * high else (high, int((known > high).sum()))


def _chart_waits(run: Run, axis: _Axis, key: str, *, alone: bool) -> Chart:
    """Build the stacked chart of waiting times by parallelism, as means over ranks."""
    waits = waits_over_steps(run)
    x = np.array([event.step or 0 for event in run.ranks], dtype=np.float64)
    if axis.by_tokens and run.steps:
        x = x * run.steps[-1].tokens
    num_skipped = 1 if len(x) > 10 else 0  # the first step includes the setup of communication
    total = np.sum(list(waits.values()), axis=0) if waits else np.zeros(0)
    top, num_beyond = _top_of_areas(total[num_skipped:])
    stack = []
    for name, values in waits.items():
        bx, by = bin_means(x[num_skipped:], 1000 * values[num_skipped:], _AREA_BUCKETS)
        stack.append(Series(name, bx, by, colour_of_cut(name), "area"))
    frame = Frame(x_label=axis.label, y_label="ms per step", y_range=(0.0, 1050 * top) if top > 0 else None)
    indices: set[int] = set(np.linspace(0, len(x) - 1, min(_TABLE_ROWS, len(x))).round().astype(int).tolist()) if len(x) else set()
    rows = tuple(
        (f"{x[index]:,.0f}", *(write_value(1000 * float(values[index])) for values in waits.values())) for index in sorted(indices)
    )
    table = Table((axis.label, *(f"{name}, ms" for name in waits)), rows)
    title = "Waiting for other ranks" if alone else f"Waiting for other ranks: {run.name}"
    note = (
        "By kind of parallelism, mean over ranks." + (" The first step is left out." if num_skipped else "") + _outside(num_beyond)
    )
    return Chart(key, title, tuple(stack), frame, table, note)


def _chart_temperature(runs: Sequence[Run], axis: _Axis) -> Chart:
    """Build the chart of each run's hottest device at the steps that record all ranks."""
    series = []
    rows = []
    num_throttled = 0
    for colour, run in enumerate(runs):
        events = [event for event in run.ranks if event.temperature_celsius]
        num_throttled += sum(any(event.throttled or ()) for event in events)
        x = np.array([event.step or 0 for event in events], dtype=np.float64)
        x = x * run.steps[-1].tokens if axis.by_tokens and run.steps else x
        y = np.array([max(event.temperature_celsius or (0.0,)) for event in events], dtype=np.float64)
        series.append(Series("hottest" if len(runs) == 1 else run.name, x, y, colour, labelled=len(runs) > 1))
        for event in events[:: max(1, len(events) // _TABLE_ROWS)]:
            reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(event.throttled or ()) if reason)
            rows.append((run.name, f"{event.step:,}", f"{max(event.temperature_celsius or (0.0,)):.0f}", reasons))
    note = "The hottest device."
    if num_throttled:
        note += f" Clocks were throttled at {num_throttled:,} of the recorded steps."
    frame = Frame(x_label=axis.label, y_label="degrees Celsius")
    table = Table(("run", "step", "hottest, °C", "throttled"), tuple(rows))
    return Chart("temperature", "Temperature", tuple(series), frame, table, note, hover=tuple(series))


def _tabulate(axis: _Axis, runs: Sequence[Run], columns: Sequence[tuple[str, Callable[[Run], Floats]]]) -> Table:
    """Build a table with a column per run and value, and rows at steps of the longest run."""
    listed = [(run, name, values) for run in runs for name, values in columns if len(run.steps)]
    if not listed:
        return Table((axis.label,), ())
    curves = [(axis.of_steps(run), values(run)) for run, _, values in listed]
    longest = max(runs, key=lambda run: len(run.steps))
    x = axis.of_steps(longest)
    indices = set(np.unique(np.linspace(0, len(x) - 1, min(_TABLE_ROWS, len(x))).round().astype(int)).tolist())
    if any(name == "validation loss" for name, _ in columns):  # few values, so each gets a row, up to a limit
        evaluated = [i for i, value in enumerate(_validation_at_steps(longest)) if math.isfinite(value)]
        indices |= set(evaluated[:: math.ceil(len(evaluated) / _TABLE_ROWS)] if evaluated else [])
    rows = []
    for index in sorted(indices):
        position = float(x[index])
        cells = [_value_at(position, *curve) for curve in curves]
        rows.append((f"{position:,.0f}", *(write_value(cell) if math.isfinite(cell) else "" for cell in cells)))
    heads = [name if len(runs) == 1 else f"{run.name}: {name}" for run, name, _ in listed]
    note = f"{len(rows)} of {len(x):,} steps; events.jsonl has all of them." if len(rows) < len(x) else ""
    return Table((axis.label, *heads), tuple(rows), note)


def _value_at(at: float, x: Floats, y: Floats) -> float:
    """Return y at the last x up to `at`, NaN outside; batch sizes of runs may differ."""
    index = int(np.searchsorted(x, at, side="right")) - 1
    return float(y[index]) if index >= 0 and at <= x[-1] else math.nan


def thin_for_hover(series: Series, buckets: int = 150) -> Series:
    """Reduce a series to few points, because the page repeats them as numbers."""
    if series.style == "area":
        return series
    x, y = thin(series.x, series.y, buckets)
    return replace(series, x=x, y=y)
