"""Fit the planner's efficiencies to published rows, with a penalty for the distance of each number
from the level above it.

The entries of `efficiencies.yaml` have levels, and an entry overrides the level above: all trainers
share numbers, one trainer may differ; all GPUs share numbers, a generation may differ, a kernel may
differ again. A number costs `pull` times the square of its distance to the level above (in factors
of e, or in the parameter's unit). Few rows therefore move it a little, many rows as far as they
require, and without any row it keeps the value of the level above. An unmeasured trainer or
accelerator gets that value too.

Rows count by the absolute error, smoothed near zero. The search is scipy's trust region with slopes
by finite differences; a row is predicted again only if an entry that it reads has changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.planner_parameters import Parameter
from benchmarks.planner_rows import Errors, Row, compute_errors
from shardwright.planner.published.measurements import PublishedRun
from shardwright.planner.rates.calibration import EfficiencyTable
from shardwright.planner.rates.efficiency import Efficiency

PULL = 0.03
"""Loss of a parameter's distance of one (a factor of e) from the level above. For comparison, a
source of n rows with a mean error of 5% has 0.05 x sqrt(n). Sources without rows in the fit are
predicted better with 0.03 to 0.1 than with 0.01, halves of the rows best with 0.01."""
SMOOTH = 0.03
"""Smaller errors count by their square, so that the last percent of noise is not fitted."""
UNDER = 1.0
"""Additional loss where memory is predicted more than 5% too low: such a run may not fit."""
WRONG = 3.0
"""Loss of a wrong `fits`, times the share of the device's memory by which it is wrong."""
STEP = 0.02
UNSEEN_ROWS_PER_SOURCE = 100
"""Rows per source of the fits without some rows."""


@dataclass(frozen=True)
class _Group:
    """Rows that read the same entries and therefore have one `Efficiency`."""

    case: PublishedRun
    indices: list[int]

    def get_efficiency(self, efficiencies: EfficiencyTable) -> Efficiency:
        return efficiencies.get_efficiency(
            self.case.cluster.accelerator, self.case.framework, self.case.features
        )


class Fit:
    """Parameters and rows with their loss; `run` minimises it."""

    def __init__(
        self,
        rows: Sequence[Row],
        parameters: Iterable[Parameter],
        start: EfficiencyTable,
        pull: float = PULL,
    ) -> None:
        self.rows = rows
        self.start = start
        self.groups = _groups(rows)
        readers: dict[tuple[str, str], PublishedRun] = {}
        for group in self.groups:
            for entry in start.list_entries(
                group.case.cluster.accelerator, group.case.framework, group.case.features
            ):
                readers.setdefault(entry, group.case)
        self.parameters = [parameter for parameter in parameters if parameter.entry in readers]
        """Parameters that at least one row reads."""
        self._readers = [readers[parameter.entry] for parameter in self.parameters]
        per_source: dict[str, int] = defaultdict(int)
        for row in rows:
            per_source[row.case.source] += 1
        # A source counts by the root of its rows: a source of five rows does not outweigh one of
        # hundreds, nor the reverse.
        weights = np.repeat([per_source[row.case.source] ** -0.5 for row in rows], 3)
        self._weights = np.concatenate([weights, np.full(len(self.parameters), pull)])
        self._known: (
            tuple[NDArray[np.float64], EfficiencyTable, list[Efficiency], NDArray[np.float64]]
            | None
        ) = None

    def run(
        self, max_turns: int, *, initial: EfficiencyTable | None = None, verbose: bool = False
    ) -> EfficiencyTable:
        """Return the best efficiencies after at most `max_turns`, without entries that equal the
        level above.

        `initial` replaces the start of the search; a start nearer to the end takes fewer turns.
        """
        found = least_squares(
            self._residuals,
            self._clip(self._make_initial_vector(initial or self.start)),
            self._slopes,
            bounds=self._bounds,
            loss=self._loss,
            max_nfev=max_turns,
            ftol=1e-4,
            xtol=1e-4,
            verbose=2 if verbose else 0,
        )
        return self._drop_redundant_entries(self._apply(found.x))

    def fit_without(
        self, left_out: Iterable[Callable[[Row], bool]], initial: EfficiencyTable
    ) -> Iterator[EfficiencyTable]:
        """Yield, for each condition, the efficiencies of a fit without the rows that meet it.

        Each is one step of the search from `initial`: residuals are linear in the distance from
        there, the loss and the penalty are the exact ones. Numbers that only the rows left out
        determine therefore return to the level above.
        """
        start = self._clip(self._make_initial_vector(initial))
        residuals = self._residuals(start)
        slopes = self._slopes(start)
        for is_left_out in left_out:
            is_fitted = np.append(
                np.repeat([not is_left_out(row) for row in self.rows], 3),
                np.full(len(start), True),
            )
            found = self._solve(start, residuals * is_fitted, slopes * is_fitted[:, None])
            yield self._drop_redundant_entries(self._apply(found))

    def _solve(
        self,
        start: NDArray[np.float64],
        residuals: NDArray[np.float64],
        slopes: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Return the numbers with the lowest loss if residuals are linear around `start`."""
        found = least_squares(
            lambda x: residuals + slopes @ (x - start),
            start,
            lambda _: slopes,
            bounds=self._bounds,
            loss=self._loss,
            max_nfev=50,
        )
        return np.asarray(found.x)

    @property
    def _bounds(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return (
            np.array([parameter.scale(parameter.low) for parameter in self.parameters]),
            np.array([parameter.scale(parameter.high) for parameter in self.parameters]),
        )

    def _clip(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        low, high = self._bounds
        return np.clip(x, low + 1e-6, high - 1e-6)

    def _make_initial_vector(self, initial: EfficiencyTable) -> NDArray[np.float64]:
        values = []
        for parameter, case in zip(self.parameters, self._readers, strict=True):
            own_value = parameter.get(initial)
            values.append(
                parameter.scale(parameter.above(initial, case) if own_value is None else own_value)
            )
        return np.array(values)

    def _apply(self, x: NDArray[np.float64]) -> EfficiencyTable:
        efficiencies = self.start
        for parameter, value in zip(self.parameters, x, strict=True):
            efficiencies = parameter.replace(efficiencies, parameter.unscale(float(value)))
        return efficiencies

    def _drop_redundant_entries(self, efficiencies: EfficiencyTable) -> EfficiencyTable:
        for parameter, case in zip(self.parameters, self._readers, strict=True):
            own_value = parameter.get(efficiencies)
            assert own_value is not None
            if (
                abs(
                    parameter.scale(own_value)
                    - parameter.scale(parameter.above(efficiencies, case))
                )
                < 0.01
            ):
                efficiencies = parameter.drop(efficiencies)
        return efficiencies

    def _residuals(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        if self._known is None or not np.array_equal(self._known[0], x):
            efficiencies = self._apply(x)
            efficiency = [group.get_efficiency(efficiencies) for group in self.groups]
            by_row = np.empty((len(self.rows), 3))
            for group in self.groups:
                for index in group.indices:
                    by_row[index] = _row_residuals(compute_errors(self.rows[index], efficiencies))
            self._known = (x.copy(), efficiencies, efficiency, by_row)
        _, efficiencies, _, by_row = self._known
        return np.concatenate([by_row.ravel(), self._distances(x, efficiencies)])

    def _distances(
        self, x: NDArray[np.float64], efficiencies: EfficiencyTable
    ) -> NDArray[np.float64]:
        above = [
            parameter.scale(parameter.above(efficiencies, case))
            for parameter, case in zip(self.parameters, self._readers, strict=True)
        ]
        return x - np.array(above)

    def _slopes(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        self._residuals(x)
        assert self._known is not None
        _, efficiencies, before, by_row = self._known
        distances = self._distances(x, efficiencies)
        slopes = np.zeros((3 * len(self.rows) + len(x), len(x)))
        for place, parameter in enumerate(self.parameters):
            step = STEP if parameter.unscale(x[place] + STEP) < parameter.high else -STEP
            changed_x = x.copy()
            changed_x[place] += step
            changed = parameter.replace(efficiencies, parameter.unscale(float(changed_x[place])))
            for group, efficiency in zip(self.groups, before, strict=True):
                if group.get_efficiency(changed) == efficiency:
                    continue
                for index in group.indices:
                    residuals = _row_residuals(compute_errors(self.rows[index], changed))
                    slopes[3 * index : 3 * index + 3, place] = (
                        np.array(residuals) - by_row[index]
                    ) / step
            slopes[3 * len(self.rows) :, place] = (
                self._distances(changed_x, changed) - distances
            ) / step
        return slopes

    def _loss(self, squares: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the loss of each squared residual with its first and second derivatives; scipy
        halves it.
        """
        rows = 3 * len(self.rows)
        found = np.zeros((3, len(squares)))
        smoothed = np.sqrt(SMOOTH**2 + squares[:rows])
        found[0, :rows] = 2 * (smoothed - SMOOTH)
        found[1, :rows] = 1 / smoothed
        found[2, :rows] = -0.5 / smoothed**3
        found[0, rows:] = 2 * squares[rows:]
        found[1, rows:] = 2
        return found * self._weights


def _groups(rows: Sequence[Row]) -> list[_Group]:
    found: dict[tuple[str, str, tuple[str, ...]], _Group] = {}
    for index, row in enumerate(rows):
        case = row.case
        key = (case.cluster.accelerator.name, case.framework, case.features)
        found.setdefault(key, _Group(case, [])).indices.append(index)
    return list(found.values())


def _row_residuals(errors: Errors) -> tuple[float, float, float]:
    """Return the residuals of time, memory and `fits` of a row; 0 where a figure is unknown.

    A row with known memory has no residual of `fits`.
    """
    time = errors.time or 0.0
    memory = errors.memory or 0.0
    if memory < -0.05:
        memory += UNDER * (memory + 0.05)
    over = 0.0 if errors.memory is not None else WRONG * errors.over
    return min(time, 1.5), min(memory, 1.5), min(over, 1.5)
