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
    nonfinite: dict[str, int]
    """Elements that were infinite or NaN before they were quantised, by kind of layer."""
    saturated_weights: tuple[str, ...]
    """Weights whose products have saturated elements."""
    nonfinite_weights: tuple[str, ...]
    """Weights whose products have infinite or NaN elements."""

    def list_event_fields(self) -> dict[str, dict[str, int] | dict[str, float]]:
        """List the fields of the step event."""
        return {
            "fp8_saturated": self.saturated,
            "fp8_flushed": self.flushed,
            "fp8_nonfinite": self.nonfinite,
        }


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
        {kind: int(row[2]) for kind, row in sums.items()},
        tuple(name for name, row in zip(names, rows, strict=True) if row[0] > 0),
        tuple(name for name, row in zip(names, rows, strict=True) if row[2] > 0),
    )


@dataclass
class RoundingMonitor:
    """Detector of weights whose products overflow, or saturate in several logged steps in a row.

    A scale follows from the values that it scales, so none should saturate.
    """

    NUM_STEPS = 3

    kind: str = "fp8"
    """Kind of the run's precision."""
    _num_saturated: dict[str, int] = field(default_factory=dict)
    _num_nonfinite: dict[str, int] = field(default_factory=dict)

    def observe(self, report: RoundingReport) -> list[str]:
        """Add a logged step; return warnings of weights that saturated in `NUM_STEPS` in a row, and
        of weights that overflow in this step but did not in the one before."""
        self._num_saturated = _count_in_a_row(self._num_saturated, report.saturated_weights)
        self._num_nonfinite = _count_in_a_row(self._num_nonfinite, report.nonfinite_weights)
        warnings = []
        if saturated := _name_weights(self._num_saturated, self.NUM_STEPS):
            warnings.append(
                f"quantised operands of {saturated} saturated in {self.NUM_STEPS} logged steps "
                "in a row: their scales do not belong to their values. Exclude them by "
                f"precision.{self.kind}.exclude, and report it"
            )
        if nonfinite := _name_weights(self._num_nonfinite, 1):
            warnings.append(
                f"operands of {nonfinite} were infinite or NaN before they were quantised, and so "
                "are their products. If the run overflows with this precision only, exclude the "
                f"layers that overflow by precision.{self.kind}.exclude; else lower the learning "
                "rate"
            )
        return warnings


def _count_in_a_row(previous: Mapping[str, int], weights: Sequence[str]) -> dict[str, int]:
    """Count for each of a step's weights the logged steps in a row that had it."""
    return {name: previous.get(name, 0) + 1 for name in weights}


def _name_weights(num_in_a_row: Mapping[str, int], num_steps: int) -> str:
    """Name the first weight that reached a number of steps; state how many more did."""
    found = [name for name, number in num_in_a_row.items() if number == num_steps]
    if not found:
        return ""
    return f"{found[0]} and {len(found) - 1} more" if len(found) > 1 else found[0]
