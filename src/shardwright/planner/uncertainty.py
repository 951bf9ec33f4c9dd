"""Intervals of predictions: how far measured runs were from predictions that never saw them.

`error_spreads.yaml` has the spread of the error by cause, and the number of measured rows of
every trainer and accelerator generation; `benchmarks/planner_intervals.py` writes it. An error
is the logarithm of measured over predicted. Causes add up as independent errors do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from math import exp, hypot, inf, log
from statistics import NormalDist
from typing import Any, Literal

from shardwright.hardware import Accelerator
from shardwright.hardware.catalog_loading import parse_yaml_table

INTERVAL_SHARE = 0.80
"""Share of measured runs inside an interval. A tenth of them is below it, a tenth above."""
MIN_FIT_PROBABILITY = (1 + INTERVAL_SHARE) / 2
"""Smallest probability of fitting of a layout that is recommended."""
ROWS_TO_HALVE = 10
"""Number of measured rows of a trainer or an accelerator generation that halves the variance
that its lack of measurements causes."""

OWN_TRAINER = "shardwright"
"""Name of this package's engine."""

ErrorCause = Literal["base", "trainer", "sparse", "accelerator", "own", "cpu"]
"""Causes of errors: `base` is a dense model under a measured trainer on a measured accelerator,
`trainer` and `accelerator` are unmeasured ones, `sparse` is a model with experts. `own` replaces
`base` and `trainer` for the memory of this package's engine, whose tensors are not a guess. `cpu`
replaces all others on CPU ranks whose rates were measured."""

_NORMAL = NormalDist()
_QUANTILE = _NORMAL.inv_cdf(MIN_FIT_PROBABILITY)


def format_probability(probability: float) -> str:
    """Format a probability as a percentage, rounded down and never certain.

    >>> format_probability(1.0), format_probability(0.898)
    ('99%', '89%')
    """
    return f"{min(max(int(100 * probability), 1), 99)}%"


@dataclass(frozen=True)
class ErrorSpread:
    """Distances from a prediction to the ends of its interval, as logarithms of ratios; both
    are at least 0."""

    low: float = 0.0
    high: float = 0.0

    def scale(self, factor: float) -> ErrorSpread:
        """Return the spread times `factor`."""
        return ErrorSpread(self.low * factor, self.high * factor)

    def add(self, other: ErrorSpread) -> ErrorSpread:
        """Return the spread of two independent errors together."""
        return ErrorSpread(hypot(self.low, other.low), hypot(self.high, other.high))

    def apply(self, predicted: float) -> tuple[float, float]:
        """Return low and high of a predicted value."""
        return predicted * exp(-self.low), predicted * exp(self.high)

    def compute_probability(self, predicted: float, limit: float) -> float:
        """Return the probability that the true value is at most `limit`.

        Logarithms of errors are two halves of normal distributions, whose tenth and ninetieth
        percentile are the ends of the interval. Without spread the probability is 0 or 1.
        """
        if predicted <= 0:
            return 1.0
        distance = log(limit / predicted) if limit > 0 else -inf
        half_width = self.high if distance > 0 else self.low
        if not half_width:
            return float(distance >= 0)
        return _NORMAL.cdf(distance / half_width * _QUANTILE)


@dataclass(frozen=True)
class Uncertainty:
    """Spreads of the errors of step time and peak memory for one kind of run."""

    time: ErrorSpread = ErrorSpread()
    memory: ErrorSpread = ErrorSpread()
    evidence: str = ""
    """Measured runs behind it, in words."""

    @property
    def memory_margin(self) -> float:
        """Share of additional memory with which a layout must fit to reach
        `MIN_FIT_PROBABILITY`."""
        return exp(self.memory.high) - 1


Quantity = Literal["time", "memory"]


@dataclass(frozen=True)
class ErrorSpreads:
    """Measured spreads by cause, and the numbers of measured rows: quantity -> name -> value.

    `num_rows` counts by trainer and by accelerator generation.
    """

    spreads: Mapping[Quantity, Mapping[ErrorCause, ErrorSpread]]
    num_rows: Mapping[Quantity, Mapping[str, int]] = field(default_factory=dict)

    def get_uncertainty(
        self, accelerator: Accelerator, trainer: str, *, is_sparse: bool, is_measured: bool = False
    ) -> Uncertainty:
        """Return the spreads of a run.

        Args:
            is_measured: a profile of the devices replaces their data sheet.
        """
        return Uncertainty(
            self._compute_spread("time", accelerator, trainer, is_sparse, is_measured),
            self._compute_spread("memory", accelerator, trainer, is_sparse, is_measured),
            "rates measured on these ranks"
            if accelerator.kind == "cpu" and is_measured
            else "measured runs: "
            + ", ".join(
                f"{self.num_rows.get('time', {}).get(name, 0) or 'none'} {preposition} {name}"
                for preposition, name in (("of", trainer), ("on", accelerator.generation))
            ),
        )

    def _compute_spread(
        self,
        quantity: Quantity,
        accelerator: Accelerator,
        trainer: str,
        is_sparse: bool,
        is_measured: bool,
    ) -> ErrorSpread:
        spreads = self.spreads[quantity]
        if accelerator.kind == "cpu" and is_measured:
            return spreads["cpu"]
        if quantity == "memory" and trainer == OWN_TRAINER:
            spread = spreads["own"]
        else:
            spread = spreads["base"].add(
                spreads["trainer"].scale(self.compute_ignorance(quantity, trainer))
            )
        spread = spread.add(
            spreads["accelerator"].scale(self.compute_ignorance(quantity, accelerator.generation))
        )
        return spread.add(spreads["sparse"]) if is_sparse else spread

    def compute_ignorance(self, quantity: Quantity, name: str) -> float:
        """Return the factor of an unmeasured trainer's or generation's spread: 1 without rows,
        towards 0 with many."""
        rows = self.num_rows.get(quantity, {}).get(name, 0)
        return float((1 + rows / ROWS_TO_HALVE) ** -0.5)


@cache
def load_error_spreads() -> ErrorSpreads:
    """Load the package's `error_spreads.yaml`."""
    source = files("shardwright.planner") / "error_spreads.yaml"
    text = source.read_text(encoding="utf-8")
    document: dict[Quantity, dict[str, Any]] = parse_yaml_table(text)
    return ErrorSpreads(
        spreads={
            quantity: {cause: ErrorSpread(*ends) for cause, ends in section["spreads"].items()}
            for quantity, section in document.items()
        },
        num_rows={quantity: section["num_rows"] for quantity, section in document.items()},
    )
