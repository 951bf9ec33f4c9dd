"""Content of a line chart before it is drawn: curves, x axis and table of values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardwright.report.axis_scale import format_axis_value
from shardwright.report.downsampling import FloatArray, thin_points
from shardwright.report.line_chart import ChartFrame, Series
from shardwright.report.page_shell import Table
from shardwright.report.recorded_run import Run

MAX_TABLE_ROWS = 40
_NUM_HOVER_BUCKETS = 150


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


@dataclass(frozen=True)
class StepAxis:
    """The x axis of all charts: steps, or tokens if the runs' batches differ in tokens."""

    label: str
    is_by_tokens: bool

    @classmethod
    def choose(cls, runs: Sequence[Run]) -> StepAxis:
        """Choose the axis on which the steps of these runs are comparable."""
        sizes = {run.start.global_batch_tokens for run in runs if run.start is not None}
        return cls("tokens seen", True) if len(sizes) > 1 else cls("step", False)

    def compute_step_positions(self, run: Run) -> FloatArray:
        """Compute the x of each step."""
        return run.tokens_seen if self.is_by_tokens else run.step_numbers

    def compute_evaluation_positions(self, run: Run) -> FloatArray:
        """Compute the x of each evaluation."""
        tokens_per_step = run.steps[-1].tokens if self.is_by_tokens and run.steps else 1
        return np.array(
            [tokens_per_step * (e.step or 0) for e in run.evaluations], dtype=np.float64
        )


def format_clipped_note(num_clipped: int) -> str:
    """Format the number of steps outside the chart; empty if there are none."""
    return (
        f" {num_clipped:,} step{'s are' if num_clipped > 1 else ' is'} outside the chart."
        if num_clipped
        else ""
    )


def align_validation(run: Run) -> FloatArray:
    """Return the validation loss at each step; NaN at steps without evaluation."""
    losses = {e.step: e.loss for e in run.evaluations}
    return np.array([losses.get(step.step, math.nan) for step in run.steps])


def build_step_table(
    axis: StepAxis, runs: Sequence[Run], columns: Sequence[tuple[str, Callable[[Run], FloatArray]]]
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
            np.linspace(0, len(x) - 1, min(MAX_TABLE_ROWS, len(x))).round().astype(int)
        ).tolist()
    )
    if any(
        name == "validation loss" for name, _ in columns
    ):  # few values, so each gets a row, up to a limit
        evaluated = [i for i, value in enumerate(align_validation(longest)) if math.isfinite(value)]
        indices |= set(
            evaluated[:: math.ceil(len(evaluated) / MAX_TABLE_ROWS)] if evaluated else []
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


def thin_for_hover(series: Series) -> Series:
    """Reduce a series to few points, because the page repeats them as numbers."""
    if series.style == "area":
        return series
    x, y = thin_points(series.x, series.y, _NUM_HOVER_BUCKETS)
    return replace(series, x=x, y=y)
