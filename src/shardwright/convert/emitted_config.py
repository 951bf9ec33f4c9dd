"""Input and result of all configuration writers, and notes on what no configuration
expresses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shardwright.config import Recipe
from shardwright.config.training import TrainingSection
from shardwright.layout import Layout
from shardwright.plans import BatchPlan

Offload = Literal["none", "optimizer", "parameters"]


@dataclass(frozen=True)
class EmittedConfig:
    """A configuration as text, and one note per part of the plan that it does not express."""

    text: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class EmitRequest:
    """Input of a writer: recipe, its resolved layout and batch, the planner's offload and nodes.

    The recipe's precision is not `auto`.
    """

    recipe: Recipe
    layout: Layout
    batch: BatchPlan
    offload: Offload = "none"
    num_nodes: int = 1

    @property
    def has_accelerators(self) -> bool:
        """True if the run is not on CPUs."""
        return self.recipe.run.device != "cpu"

    @property
    def peak_learning_rate(self) -> float:
        """Peak learning rate, scaled by `batch_scaling`: other systems get the product."""
        return self.recipe.training.learning_rate * self._batch_scaling_factor

    @property
    def min_learning_rate(self) -> float:
        """Learning rate at the end of the schedule, with the same scaling."""
        return self.recipe.training.min_learning_rate * self._batch_scaling_factor

    @property
    def _batch_scaling_factor(self) -> float:
        training = self.recipe.training
        if training.batch_scaling == "none":
            return 1.0
        assert training.base_batch_size is not None  # validated by the schema
        ratio = self.batch.global_batch_size / training.base_batch_size
        return math.sqrt(ratio) if training.batch_scaling == "sqrt" else ratio

    def list_common_notes(self, system: str) -> Iterator[str]:
        """Yield notes on recipe settings that no other system's configuration expresses."""
        recipe = self.recipe
        layout = self.layout
        yield f"model, tokenizer, data: configure them in {system}"
        for key in ("wrap_blocks", "prefetch_depth", "max_gathers_in_flight", "bucket_size_bytes"):
            default = type(layout).__dataclass_fields__[key].default
            if key in recipe.layout.model_fields_set and getattr(layout, key) != default:
                value = getattr(layout, key)
                yield f"layout.{key}: {value}: not carried; {system} has its own settings"
        if recipe.training.max_steps is None:
            yield (
                f"training.num_epochs: {recipe.training.num_epochs:g}: "
                "schedules are counted in steps; set the number of steps"
            )
        not_carried = {
            "model.freeze": bool(recipe.model.freeze),
            "adapters": getattr(recipe, "adapters", None) is not None,
            "moe": bool(recipe.moe.model_fields_set),
            "evaluation": bool(recipe.evaluation.model_fields_set),
            "checkpoint": bool(recipe.checkpoint.model_fields_set),
            "elastic": bool(recipe.elastic.model_fields_set),
            "precision.master_weights": recipe.precision.master_weights != "fp32",
            "precision.reduce_dtype": recipe.precision.reduce_dtype != "fp32",
        }
        for key, is_set in not_carried.items():
            if is_set:
                yield f"{key}: not carried"


def build_warmup_notes(training: TrainingSection) -> list[str]:
    """Return a note on the difference to other systems' warmup, if the recipe has warmup."""
    if not training.warmup_steps:
        return []
    return [
        f"training.warmup_steps: {training.warmup_steps}: "
        "here step i uses peak x (i + 1) / (w + 1), "
        "there about peak x i / w"
    ]


def build_comment_header(notes: tuple[str, ...], heading: str) -> str:
    """Return heading and notes as comment lines."""
    lines = [heading, *(f"not expressed: {note}" for note in notes)]
    return "".join(f"# {line}\n" for line in lines)
