"""Rounding of quantised operands in logged steps: counts per kind of layer, and warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shardwright.layout import AXES
from shardwright.model.products.scaled_product import RoundingTotals
from shardwright.parallel import ParallelModel


def sum_rounding_table(model: ParallelModel, totals: RoundingTotals) -> Tensor:
    """Sum a step's counts over all ranks; every copy of an operand counts. Collective."""
    return model.sum_over(totals.pop_table(model.device), AXES)


@dataclass(frozen=True)
class RoundingReport:
    """Rounding of the quantised operands of one step, over all ranks."""

    saturated: dict[str, int]
    """Elements clamped to the format's largest number, by kind of layer."""
    flushed: dict[str, float]
    """Fraction of the elements that became zero, by kind of layer."""
    saturated_weights: tuple[str, ...]
    """Weights whose products have saturated elements."""


def read_rounding(
    values: Sequence[float], names: Sequence[str], kind_of_weight: Mapping[str, str]
) -> RoundingReport:
    """Read the flattened table of `sum_rounding_table`, in host memory."""
    num_columns = RoundingTotals.NUM_COLUMNS
    rows = [values[start : start + num_columns] for start in range(0, len(values), num_columns)]
    sums = {kind: [0.0] * num_columns for kind in dict.fromkeys(kind_of_weight.values())}
    for name, row in zip(names, rows, strict=True):
        kind = kind_of_weight[name]
        sums[kind] = [a + b for a, b in zip(sums[kind], row, strict=True)]
    return RoundingReport(
        {kind: int(row[0]) for kind, row in sums.items()},
        {kind: row[1] / max(1.0, row[3]) for kind, row in sums.items()},
        tuple(name for name, row in zip(names, rows, strict=True) if row[0] > 0),
    )


@dataclass
class SaturationMonitor:
    """Detector of weights whose products saturate in several logged steps in a row.

    A scale follows from the values that it scales, so none should.
    """

    NUM_STEPS = 3

    kind: str = "fp8"
    """Kind of the run's precision."""
    _num_in_a_row: dict[str, int] = field(default_factory=dict)

    def observe(self, report: RoundingReport) -> str | None:
        """Add a logged step; return a warning when weights reach `NUM_STEPS` in a row."""
        self._num_in_a_row = {
            name: self._num_in_a_row.get(name, 0) + 1 for name in report.saturated_weights
        }
        found = [name for name, number in self._num_in_a_row.items() if number == self.NUM_STEPS]
        if not found:
            return None
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        return (
            f"quantised operands of {found[0]}{others} saturated in {self.NUM_STEPS} logged steps "
            "in a row: their scales do not belong to their values. Exclude them by "
            f"precision.{self.kind}.exclude, and report it"
        )
