"""The planner's prediction of a run, and its comparison with the first steps.

Made only if the recipe names its `cluster`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median

from shardwright.architecture import ModelShape
from shardwright.config.layout import ClusterSection
from shardwright.planner.auto_layout import build_cluster
from shardwright.planner.candidate import Candidate
from shardwright.planner.prediction import MemoryParts, Prediction
from shardwright.planner.predictor import predict, predict_rank_memory
from shardwright.planner.problem import build_plan_candidate
from shardwright.planner.rates.calibration import load_efficiencies
from shardwright.training.checks.run_checks import ValidatedRun
from shardwright.units import format_bytes, format_seconds

logger = logging.getLogger(__name__)

_WARMUP_STEPS = 2
"""First steps, which are not measured: kernels are selected and memory grows."""
_MEASURED_STEPS = 5
"""Steps after those, which are measured."""


def predict_training_run(validated_run: ValidatedRun) -> Prediction | None:
    """Predict memory and time of the plan that runs.

    None if the recipe names no cluster, or 8-bit products are emulated.

    Raises:
        InputError: The cluster is unknown, or its size does not match the number of ranks.
    """
    recipe = validated_run.recipe
    if recipe.cluster is None or _emulates_low_precision(validated_run):
        return None
    return _predict_cached(
        validated_run.shape, build_plan_candidate(recipe, validated_run.plan), recipe.cluster
    )


def _emulates_low_precision(validated_run: ValidatedRun) -> bool:
    """Return True, and log it, if 8-bit products are emulated, whose time is not predicted."""
    section = validated_run.recipe.precision.low_precision
    cluster = validated_run.recipe.cluster
    if section is None or cluster is None:
        return False
    peaks = build_cluster(
        cluster, validated_run.plan.layout.world_size
    ).accelerator.peak_flops_per_second
    if "fp8" in peaks and not section.emulate:
        return False
    logger.info("memory and time are not predicted: 8-bit products are emulated")
    return True


@lru_cache(maxsize=4)
def _predict_cached(shape: ModelShape, candidate: Candidate, section: ClusterSection) -> Prediction:
    """Predict, with a cache: the run folder and the comparison need the same prediction."""
    cluster = build_cluster(section, candidate.layout.world_size)
    return predict(
        shape, candidate, cluster, load_efficiencies().get_efficiency(cluster.accelerator)
    )


def predict_training_memory(validated_run: ValidatedRun) -> MemoryParts:
    """Predict the bytes on the fullest rank; they do not depend on the cluster."""
    candidate = build_plan_candidate(validated_run.recipe, validated_run.plan)
    return max(predict_rank_memory(validated_run.shape, candidate), key=lambda parts: parts.live)


@dataclass
class PredictionComparison:
    """Log message, after the first steps, that compares them with the prediction."""

    prediction: Prediction
    has_short_rows: bool = False
    """True if rows may be shorter than sequence_length; the prediction assumes full rows."""
    step_seconds: list[float] = field(default_factory=list)

    def add(self, step_seconds: float, memory_bytes: tuple[int, ...]) -> None:
        """Add a step of this process and the peak memory of each rank so far."""
        if len(self.step_seconds) > _WARMUP_STEPS + _MEASURED_STEPS:
            return
        self.step_seconds.append(step_seconds)
        if len(self.step_seconds) == _WARMUP_STEPS + _MEASURED_STEPS:
            self.step_seconds.append(0.0)  # marks the comparison as logged
            logger.info(
                "%s",
                self.describe(
                    median(self.step_seconds[_WARMUP_STEPS:-1]), max(memory_bytes, default=0)
                ),
            )

    def describe(self, seconds: float, memory_bytes: int) -> str:
        """Describe prediction and measurement with the error of the prediction."""
        predicted_seconds = self.prediction.time.step
        predicted_bytes = self.prediction.memory.live
        text = (
            f"predicted step time {format_seconds(predicted_seconds)}, "
            f"measured {format_seconds(seconds)} ({seconds / predicted_seconds - 1:+.0%})"
        )
        if memory_bytes > 0:
            text += (
                f"; predicted memory {format_bytes(predicted_bytes)}, "
                f"measured {format_bytes(memory_bytes)} ({memory_bytes / predicted_bytes - 1:+.0%})"
            )
        if self.has_short_rows:
            text += "; rows were shorter than the full rows that the prediction assumes"
        return text
