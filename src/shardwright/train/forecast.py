"""The planner's prediction of a run, and its comparison with the first steps.

Made only if the recipe names its `cluster`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import median

from shardwright.architecture import ModelShape
from shardwright.config import Recipe
from shardwright.config.layout import ClusterSection
from shardwright.planner.achieved import load_efficiencies
from shardwright.planner.automatic import cluster_of
from shardwright.planner.candidate import Candidate
from shardwright.planner.efficiency import Efficiency
from shardwright.planner.facts import facts_of
from shardwright.planner.memory import predict_memory
from shardwright.planner.pipeline import pipeline_of
from shardwright.planner.predict import predict
from shardwright.planner.prediction import MemoryParts, Prediction
from shardwright.planner.question import template_of
from shardwright.train.preflight import Checked
from shardwright.units import format_bytes, format_seconds

logger = logging.getLogger(__name__)

_WARM_STEPS = 2
"""First steps, which are not measured: kernels are selected and memory grows."""
_COUNTED_STEPS = 5
"""Steps after those, which are measured."""


def forecast(checked: Checked) -> Prediction | None:
    """Predict memory and time of the plan that runs; None if the recipe names no cluster.

    Raises:
        InputError: The cluster is unknown, or its size does not match the number of ranks.
    """
    recipe = checked.recipe
    if recipe.cluster is None:
        return None
    return _predicted(checked.shape, candidate_of_run(recipe, checked), recipe.cluster)


@lru_cache(maxsize=4)
def _predicted(shape: ModelShape, candidate: Candidate, section: ClusterSection) -> Prediction:
    """Predict, with a cache: the run folder and the comparison need the same prediction."""
    cluster = cluster_of(section, candidate.layout.world_size)
    return predict(shape, candidate, cluster, load_efficiencies().of(cluster.accelerator))


def forecast_memory(checked: Checked) -> MemoryParts:
    """Predict the bytes on the fullest rank; they do not depend on the cluster."""
    plan = checked.plan
    facts = facts_of(checked.shape)
    candidate = candidate_of_run(checked.recipe, checked)
    pipeline = pipeline_of(
        facts, plan.layout, plan.batch.gradient_accumulation_steps, plan.batch.sequence_length
    )
    return max(
        (predict_memory(facts, candidate, load, Efficiency()) for load in pipeline.loads),
        key=lambda parts: parts.live,
    )


def candidate_of_run(recipe: Recipe, checked: Checked) -> Candidate:
    """Describe the plan that runs as a candidate of the planner."""
    plan = checked.plan
    return replace(
        template_of(recipe),
        layout=plan.layout,
        micro_batch_size=plan.batch.micro_batch_size,
        gradient_accumulation_steps=plan.batch.gradient_accumulation_steps,
        recompute=plan.recompute,
    )


@dataclass
class Comparison:
    """Log message, after the first steps, that compares them with the prediction."""

    prediction: Prediction
    short_rows: bool = False
    """True if rows may be shorter than sequence_length; the prediction assumes full rows."""
    seconds: list[float] = field(default_factory=list)

    def add(self, step_seconds: float, memory_bytes: tuple[int, ...]) -> None:
        """Add a step of this process and the peak memory of each rank so far."""
        if len(self.seconds) > _WARM_STEPS + _COUNTED_STEPS:
            return
        self.seconds.append(step_seconds)
        if len(self.seconds) == _WARM_STEPS + _COUNTED_STEPS:
            self.seconds.append(0.0)  # marks the comparison as logged
            logger.info(
                "%s",
                self.describe(median(self.seconds[_WARM_STEPS:-1]), max(memory_bytes, default=0)),
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
        if self.short_rows:
            text += "; rows were shorter than the full rows that the prediction assumes"
        return text
