"""The planner's efficiencies that make published rows likeliest, each held to what stands one level
above it.

A level is what an entry of `efficiencies.yaml` overrides: all trainers share numbers, a trainer may
differ; all GPUs share numbers, a generation may differ, a kernel's may differ again. A number costs
`pull` times the square of its distance to the level above (in factors of e, or in the parameter's
unit), so that few rows move it a little and many as far as they tell; what no row tells stays what
the others have. That is also what a trainer or an accelerator gets that nobody has measured.

Rows count by the absolute error, smoothed near zero. scipy's trust region does the search, from
slopes by finite differences: a row is predicted anew only where what it reads has changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.planner_parameters import Parameter
from benchmarks.planner_rows import Errors, Row, errors_of
from shardwright.planner.calibration import EfficiencyTable
from shardwright.planner.efficiency import Efficiency
from shardwright.planner.published.measurements import PublishedRun

PULL = 0.01
"""Of the loss, a parameter's distance of one (a factor of e) from the level above. A source of n
rows with a mean error of 5% has 0.05 x sqrt(n). Halves of the rows predict each other best at it,
of 0.01, 0.03 and 0.1."""
SMOOTH = 0.03
"""Errors below it count by their square: nothing is gained by fitting noise to the last percent."""
UNDER = 1.0
"""What memory costs on top where it is more than 5% under: a run that was said to fit does not."""
WRONG = 3.0
"""What `fits` costs where it is wrong: so many times the share of the device's memory by which it
is.
"""
STEP = 0.02


@dataclass(frozen=True)
class _Group:
    """Rows that read the same entries, and so have one `Efficiency`."""

    case: PublishedRun
    indices: list[int]

    def achieved(self, efficiencies: EfficiencyTable) -> Efficiency:
        return efficiencies.get_efficiency(
            self.case.cluster.accelerator, self.case.framework, self.case.features
        )


class Fit:
    """Parameters, rows and what both cost; `run` finds the best."""

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
        """Those that some row reads."""
        self._readers = [readers[parameter.entry] for parameter in self.parameters]
        per_source: dict[str, int] = defaultdict(int)
        for row in rows:
            per_source[row.case.source] += 1
        # A source counts by the root of its rows: one of five does not outweigh one of hundreds,
        # nor the other way round.
        weights = np.repeat([per_source[row.case.source] ** -0.5 for row in rows], 3)
        self._pending_weight_gradients = np.concatenate(
            [weights, np.full(len(self.parameters), pull)]
        )
        self._known: (
            tuple[NDArray[np.float64], EfficiencyTable, list[Efficiency], NDArray[np.float64]]
            | None
        ) = None

    def run(
        self, most_turns: int, *, begin: EfficiencyTable | None = None, verbose: bool = False
    ) -> EfficiencyTable:
        """The best efficiencies after at most so many turns; entries that say no more than the
        level above are left out.

        `begin` is where the search begins, if not at the start: nearer to the end, it takes fewer
        turns.
        """
        low = np.array([parameter.scaled(parameter.low) for parameter in self.parameters])
        high = np.array([parameter.scaled(parameter.high) for parameter in self.parameters])
        found = least_squares(
            self._residuals,
            np.clip(self._begin(begin or self.start), low + 1e-6, high - 1e-6),
            self._slopes,
            bounds=(low, high),
            loss=self._loss,
            max_nfev=most_turns,
            ftol=1e-4,
            xtol=1e-4,
            verbose=2 if verbose else 0,
        )
        return self._plain(self._put(found.x))

    def _begin(self, begin: EfficiencyTable) -> NDArray[np.float64]:
        values = []
        for parameter, case in zip(self.parameters, self._readers, strict=True):
            own = parameter.get(begin)
            values.append(parameter.scaled(parameter.above(begin, case) if own is None else own))
        return np.array(values)

    def _put(self, x: NDArray[np.float64]) -> EfficiencyTable:
        efficiencies = self.start
        for parameter, value in zip(self.parameters, x, strict=True):
            efficiencies = parameter.put(efficiencies, parameter.plain(float(value)))
        return efficiencies

    def _plain(self, efficiencies: EfficiencyTable) -> EfficiencyTable:
        for parameter, case in zip(self.parameters, self._readers, strict=True):
            own = parameter.get(efficiencies)
            assert own is not None
            if (
                abs(parameter.scaled(own) - parameter.scaled(parameter.above(efficiencies, case)))
                < 0.01
            ):
                efficiencies = parameter.drop(efficiencies)
        return efficiencies

    def _residuals(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        if self._known is None or not np.array_equal(self._known[0], x):
            efficiencies = self._put(x)
            achieved = [group.achieved(efficiencies) for group in self.groups]
            by_row = np.empty((len(self.rows), 3))
            for group in self.groups:
                for index in group.indices:
                    by_row[index] = _row_residuals(errors_of(self.rows[index], efficiencies))
            self._known = (x.copy(), efficiencies, achieved, by_row)
        _, efficiencies, _, by_row = self._known
        return np.concatenate([by_row.ravel(), self._distances(x, efficiencies)])

    def _distances(
        self, x: NDArray[np.float64], efficiencies: EfficiencyTable
    ) -> NDArray[np.float64]:
        above = [
            parameter.scaled(parameter.above(efficiencies, case))
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
            step = STEP if parameter.plain(x[place] + STEP) < parameter.high else -STEP
            moved = x.copy()
            moved[place] += step
            changed = parameter.put(efficiencies, parameter.plain(float(moved[place])))
            for group, achieved in zip(self.groups, before, strict=True):
                if group.achieved(changed) == achieved:
                    continue
                for index in group.indices:
                    now = _row_residuals(errors_of(self.rows[index], changed))
                    slopes[3 * index : 3 * index + 3, place] = (
                        np.array(now) - by_row[index]
                    ) / step
            slopes[3 * len(self.rows) :, place] = (
                self._distances(moved, changed) - distances
            ) / step
        return slopes

    def _loss(self, squares: NDArray[np.float64]) -> NDArray[np.float64]:
        """scipy's: of each squared residual the loss, and its first and second derivative; scipy
        halves them.
        """
        rows = 3 * len(self.rows)
        found = np.zeros((3, len(squares)))
        smoothed = np.sqrt(SMOOTH**2 + squares[:rows])
        found[0, :rows] = 2 * (smoothed - SMOOTH)
        found[1, :rows] = 1 / smoothed
        found[2, :rows] = -0.5 / smoothed**3
        found[0, rows:] = 2 * squares[rows:]
        found[1, rows:] = 2
        return found * self._pending_weight_gradients


def _groups(rows: Sequence[Row]) -> list[_Group]:
    found: dict[tuple[str, str, tuple[str, ...]], _Group] = {}
    for index, row in enumerate(rows):
        case = row.case
        key = (case.cluster.accelerator.name, case.framework, case.features)
        found.setdefault(key, _Group(case, [])).indices.append(index)
    return list(found.values())


def _row_residuals(errors: Errors) -> tuple[float, float, float]:
    """Time, memory and `fits` of a row, 0 where it does not say. A row that says its memory need
    not be right about `fits`, too.
    """
    time = errors.time or 0.0
    memory = errors.memory or 0.0
    if memory < -0.05:
        memory += UNDER * (memory + 0.05)
    over = 0.0 if errors.memory is not None else WRONG * errors.over
    return min(time, 1.5), min(memory, 1.5), min(over, 1.5)
