"""What every written configuration has in common: its text, and what of the plan it cannot say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shardwright.config import Recipe
from shardwright.config.training import TrainingSection
from shardwright.plan import Plan

Offload = Literal["none", "optimizer", "parameters"]


@dataclass(frozen=True)
class Emitted:
    """A configuration as text, and a line for each thing of the plan that the other system is not told by it."""

    text: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Subject:
    """What is written: a recipe whose layout is known, its plan, and the offloading and machines that the planner supposed."""

    recipe: Recipe
    plan: Plan
    offload: Offload = "none"
    num_nodes: int = 1

    @property
    def on_accelerators(self) -> bool:
        """Whether devices other than CPUs are meant."""
        return self.recipe.run.device != "cpu"

    @property
    def peak_learning_rate(self) -> float:
        """With the factor that `batch_scaling` puts on it: the other system gets the product."""
        return self.recipe.training.learning_rate * self._batch_factor

    @property
    def min_learning_rate(self) -> float:
        """Where the schedule ends, scaled alike."""
        return self.recipe.training.min_learning_rate * self._batch_factor

    @property
    def _batch_factor(self) -> float:
        training = self.recipe.training
        if training.batch_scaling == "none":
            return 1.0
        assert training.base_batch_size is not None  # the schema demands it
        ratio = self.plan.batch.global_batch_size / training.base_batch_size
        return math.sqrt(ratio) if training.batch_scaling == "sqrt" else ratio

    def common_notes(self, system: str, *, handled: frozenset[str] = frozenset()) -> Iterator[str]:
        """What no configuration file of another system holds, where the recipe says it; `handled` names exceptions by key."""
        recipe, layout = self.recipe, self.plan.layout
        yield f"model, tokenizer, data: {system} takes them in its own way"
        for key in ("wrap_blocks", "prefetch_depth", "max_gathers_in_flight", "bucket_size_bytes"):
            if key in recipe.layout.model_fields_set and getattr(layout, key) != type(layout).__dataclass_fields__[key].default:
                yield f"layout.{key}: {getattr(layout, key)}: not carried; {system} has knobs of its own"
        if recipe.training.max_steps is None:
            yield f"training.num_epochs: {recipe.training.num_epochs:g}: schedules are counted in steps; give them by hand"
        told = {
            "model.freeze": bool(recipe.model.freeze),
            "adapters": getattr(recipe, "adapters", None) is not None,
            "moe": bool(recipe.moe.model_fields_set),
            "evaluation": bool(recipe.evaluation.model_fields_set),
            "checkpoint": bool(recipe.checkpoint.model_fields_set),
            "elastic": bool(recipe.elastic.model_fields_set),
            "precision.reduce_dtype": recipe.precision.reduce_dtype != "fp32",
        }
        for key, said in told.items():
            if said and key not in handled:
                yield f"{key}: not carried"


def warmup_note(training: TrainingSection) -> list[str]:
    """How other systems' warmups differ from ours, where there is one."""
    if not training.warmup_steps:
        return []
    return [f"training.warmup_steps: {training.warmup_steps}: here step i runs at peak x (i + 1) / (w + 1), there at about i / w"]


def commented(notes: tuple[str, ...], heading: str, sign: str = "#") -> str:
    """The heading and the notes as comment lines."""
    lines = [heading, *(f"not expressed: {note}" for note in notes)]
    return "".join(f"{sign} {line}\n" for line in lines)
