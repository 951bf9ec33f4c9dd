"""What the planner says of a run before it starts, and how the first steps compare. Only where the recipe names its `cluster`."""

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

_WARM_STEPS, _COUNTED_STEPS = 2, 5
"""Steps that are left out (kernels are chosen, memory grows), and steps that are then counted."""


def forecast(checked: Checked) -> Prediction | None:
    """Memory and time of the very plan that runs; None without a cluster in the recipe.

    Raises:
        InputError: a cluster that is not known, or that the ranks do not fill.
    """
    recipe = checked.recipe
    if recipe.cluster is None:
        return None
    return _predicted(checked.shape, candidate_of_run(recipe, checked), recipe.cluster)


@lru_cache(maxsize=4)
def _predicted(shape: ModelShape, candidate: Candidate, section: ClusterSection) -> Prediction:
    """Kept: the run folder asks first, the comparison with the first steps a moment later."""
    cluster = cluster_of(section, candidate.layout.world_size)
    return predict(shape, candidate, cluster, load_efficiencies().of(cluster.accelerator))


def forecast_memory(checked: Checked) -> MemoryParts:
    """Bytes on the fullest rank, whatever the device: no cluster is needed for what tensors take."""
    facts, candidate, plan = facts_of(checked.shape), candidate_of_run(checked.recipe, checked), checked.plan
    pipeline = pipeline_of(facts, plan.layout, plan.batch.gradient_accumulation_steps, plan.batch.sequence_length)
    return max((predict_memory(facts, candidate, load, Efficiency()) for load in pipeline.loads), key=lambda parts: parts.live)


def candidate_of_run(recipe: Recipe, checked: Checked) -> Candidate:
    """The very plan that runs, as the planner takes it."""
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
    """Collects the first steps, then says in the log how they compare with the prediction."""

    prediction: Prediction
    short_rows: bool = False
    """Whether rows end before sequence_length, which is what is predicted."""
    seconds: list[float] = field(default_factory=list)

    def add(self, step_seconds: float, memory_bytes: tuple[int, ...]) -> None:
        """One more step of this process, with the peak of each rank so far."""
        if len(self.seconds) > _WARM_STEPS + _COUNTED_STEPS:
            return
        self.seconds.append(step_seconds)
        if len(self.seconds) == _WARM_STEPS + _COUNTED_STEPS:
            self.seconds.append(0.0)  # said once
            logger.info("%s", self.describe(median(self.seconds[_WARM_STEPS:-1]), max(memory_bytes, default=0)))

    def describe(self, seconds: float, memory_bytes: int) -> str:
        """Predicted against measured, with the error of the prediction."""
        time, memory = self.prediction.time.step, self.prediction.memory.live
        told = (
            f"a step was predicted to take {format_seconds(time)} and takes {format_seconds(seconds)} ({seconds / time - 1:+.0%})"
        )
        if memory_bytes > 0:
            told += f"; memory {format_bytes(memory)}, measured {format_bytes(memory_bytes)} ({memory_bytes / memory - 1:+.0%})"
        return told + ("; rows were shorter than the full ones that are predicted" if self.short_rows else "")
