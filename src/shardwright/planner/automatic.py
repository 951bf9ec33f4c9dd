"""`layout: auto`: let the planner choose among the layouts that `train` can run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwright import placement
from shardwright.config.layout import ClusterSection, LayoutSection
from shardwright.config.schema import Recipe
from shardwright.errors import InputError, LayoutError
from shardwright.hardware import Cluster
from shardwright.hardware.load import parse_cluster
from shardwright.hardware.profile import load_profile
from shardwright.plan import settle_precision
from shardwright.planner.achieved import load_efficiencies
from shardwright.planner.candidate import Candidate
from shardwright.planner.facts import facts_of
from shardwright.planner.predict import Predictor
from shardwright.planner.prediction import Prediction
from shardwright.planner.question import choose_precision_on, question_of, shape_of, template_of
from shardwright.planner.scaling import fewest_gpus, resized
from shardwright.planner.search import search
from shardwright.planner.space import Question
from shardwright.units import format_bytes


def cluster_of(section: ClusterSection, world_size: int) -> Cluster:
    """Build the recipe's cluster with one device per rank.

    Raises:
        InputError: unknown devices or links, or a number of ranks that is no multiple of a
            node's devices.
    """
    profile = None if section.profile is None else load_profile(section.profile)
    return resized(parse_cluster(section.node, link=section.link, profile=profile), world_size)


def choose_layout(recipe: Recipe, cluster: Cluster, world_size: int) -> tuple[Recipe, Prediction]:
    """Return the recipe with layout, micro-batch, accumulation and recomputation chosen.

    Values that the recipe sets are kept.

    Raises:
        LayoutError: no layout that `train` can run fits.
    """
    shape = shape_of(recipe)
    training = recipe.training
    facts = facts_of(shape)
    efficiency = load_efficiencies().of(cluster.accelerator)

    def can_run(candidate: Candidate) -> bool:
        try:
            placement.check(shape, candidate.layout, candidate.sequence_length)
        except InputError:
            return False
        return candidate.runnable

    resolved = settle_precision(recipe, choose_precision_on(cluster.accelerator))
    question: Question = replace(question_of(recipe, template_of(resolved), world_size), allowed=can_run)
    if training.global_batch_size is not None:
        question = replace(
            question,
            micro_batch_sizes=None if training.micro_batch_size is None else (training.micro_batch_size,),
            accumulations=None if training.gradient_accumulation_steps is None else (training.gradient_accumulation_steps,),
        )
    if "recompute" in recipe.model_fields_set:
        question = replace(question, recomputes=(recipe.recompute,))
    result = search(Predictor(facts, cluster, efficiency), question, top=1)
    if result.chosen is None:
        larger = fewest_gpus(facts, cluster, efficiency, question)
        remedy = "Shorten the sequence, unset recompute and micro_batch_size, or run `plan`"
        if larger is not None:
            remedy = f"Use {larger.num_gpus} devices: {larger.candidate.describe()}"
        capacity = format_bytes(cluster.accelerator.memory_bytes)
        raise LayoutError(
            f"no layout that the recipe allows fits on {world_size} devices of {capacity}",
            field="layout",
            got="auto",
            remedy=remedy,
        )
    return put_in(recipe, result.chosen.candidate), result.chosen


def put_in(recipe: Recipe, candidate: Candidate) -> Recipe:
    """Return the recipe with the candidate's layout, batch and recomputation written into
    it."""
    layout = candidate.layout
    degrees: dict[str, Any] = {name: getattr(layout, name) for name in LayoutSection.model_fields if name != "auto"}
    batch = {
        "micro_batch_size": candidate.micro_batch_size,
        "gradient_accumulation_steps": candidate.gradient_accumulation_steps,
    }
    return recipe.model_copy(
        update={
            "layout": LayoutSection(**degrees),
            "training": recipe.training.model_copy(update=batch),
            "recompute": candidate.recompute,
        }
    )
