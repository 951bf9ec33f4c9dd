"""Result of a search, and the order of equally fast layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwright.planner.candidate import Candidate
from shardwright.planner.prediction import Prediction

EQUAL_STEP_SHARE = 0.05
"""Layouts whose step times differ by less than this share are indistinguishable. Of two measured
runs predicted 2 to 5% apart, the predicted order is right for two pairs in three
(docs/planning-accuracy.md, "Order of layouts")."""


@dataclass
class SearchResult:
    """Search result, best first, one prediction per `build_layout_key`, and search statistics."""

    predictions: list[Prediction] = field(default_factory=list)
    num_proven: int = 0
    """Number of leading predictions that no unexplored layout can precede."""
    num_predicted: int = 0
    num_too_large: int = 0
    best_with_margin: Prediction | None = None
    """Best layout that is not tight, if the best of all is. Not necessarily among
    `predictions`."""

    @property
    def chosen(self) -> Prediction | None:
        """Recommended layout. It is tight only if every layout that fits is."""
        return self.best_with_margin or self.best

    @property
    def best(self) -> Prediction | None:
        """Simplest layout among those within `EQUAL_STEP_SHARE` of the fastest."""
        return select_simplest(self.predictions)


def select_simplest(predictions: Sequence[Prediction]) -> Prediction | None:
    """Return the prediction with the least `measure_complexity` among those that are
    indistinguishable from the fastest; of several the fastest. None without predictions."""
    return min(
        select_indistinguishable(predictions),
        key=lambda prediction: (measure_complexity(prediction.candidate), prediction.time.step),
        default=None,
    )


def recommend(predictions: Sequence[Prediction]) -> Prediction | None:
    """Return the simplest of the fastest layouts that are not tight, or of all if all are."""
    return select_simplest([each for each in predictions if not each.is_tight] or predictions)


def select_indistinguishable(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return the predictions that are within `EQUAL_STEP_SHARE` of the fastest, itself
    included."""
    limit = min((p.time.step for p in predictions), default=0.0) * (1 + EQUAL_STEP_SHARE)
    return [prediction for prediction in predictions if prediction.time.step <= limit]


def measure_complexity(candidate: Candidate) -> tuple[int, int]:
    """Return a candidate's complexity: axes of model parallelism in use (pp, tp, cp, ep), and ZeRO
    stage.

    Degrees do not count: of published runs whose predictions are equal, those with fewer axes are
    faster, but those with smaller degrees are not (decision 205).
    """
    layout = candidate.layout
    degrees = (layout.pp, layout.tp, layout.cp, layout.ep)
    return sum(degree > 1 for degree in degrees), layout.zero_stage


def build_layout_key(candidate: Candidate) -> tuple[int, ...]:
    """Return the key that distinguishes layouts in the table: degrees and ZeRO stage, without
    details."""
    layout = candidate.layout
    return layout.pp, layout.tp, layout.cp, layout.ep, layout.zero_stage


class LayoutTable:
    """Best predictions of a search, by `build_layout_key`."""

    def __init__(self) -> None:
        self.predicted: dict[tuple[int, ...], Prediction] = {}
        self.proven: dict[tuple[int, ...], Prediction] = {}
        """Those to which the search has no alternative left, in their order."""
        self.min_parallel_axes: int | None = None
        """Fewest axes of model parallelism of those that are as fast as the first."""

    @property
    def max_equal_seconds(self) -> float:
        """Most seconds of a step that is as fast as the first proven one."""
        return next(iter(self.proven.values())).time.step * (1 + EQUAL_STEP_SHARE)

    def add(self, prediction: Prediction) -> None:
        """Add a prediction if it is the fastest of its key."""
        key = build_layout_key(prediction.candidate)
        known = self.predicted.get(key)
        if known is None or prediction.time.step < known.time.step:
            self.predicted[key] = prediction

    def prove(self, prediction: Prediction) -> None:
        """Record a prediction as the best of its key, if none is yet."""
        self.proven.setdefault(build_layout_key(prediction.candidate), prediction)
        if prediction.time.step <= self.max_equal_seconds:
            num_axes = measure_complexity(prediction.candidate)[0]
            if self.min_parallel_axes is None or num_axes < self.min_parallel_axes:
                self.min_parallel_axes = num_axes

    def list_predictions(self) -> list[Prediction]:
        """List the predictions, fastest first. Those that are not proven follow equal ones, and
        other equally good layouts may be unexplored."""
        table = self.proven | {
            key: prediction for key, prediction in self.predicted.items() if key not in self.proven
        }
        return sorted(table.values(), key=lambda prediction: prediction.time.step)
