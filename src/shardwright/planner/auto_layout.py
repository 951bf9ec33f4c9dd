"""`layout: auto`: let the planner choose among the layouts that `train` can run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

from shardwright.architecture import ModelShape
from shardwright.config.layout import SETTINGS_WITH_AUTO, ClusterSection, LayoutSection
from shardwright.config.offload import OffloadSection, OffloadTier
from shardwright.config.recipe import Recipe
from shardwright.errors import LayoutError
from shardwright.hardware import Cluster
from shardwright.layout.degrees import ExpertDispatch
from shardwright.planner.candidate import OPTIMIZER_OFFLOADS, Candidate
from shardwright.planner.cluster_choice import load_cluster
from shardwright.planner.memory_settings import search_run_layouts
from shardwright.planner.prediction import Prediction
from shardwright.planner.predictor import Predictor, build_predictor
from shardwright.planner.problem import (
    build_plan_candidate,
    build_problem,
    build_template,
    choose_precision_on,
    get_recipe_facts,
    read_planning_shape,
    resolve_compilation_on,
    restrict_to_runnable,
)
from shardwright.planner.scaling import find_min_gpus, resize_cluster
from shardwright.planner.search.space import PlanningProblem
from shardwright.planner.step_profile import (
    StepProfile,
    build_correction,
    describe_measurements,
)
from shardwright.planner.update_place import choose_update_place
from shardwright.plans import Plan, resolve_precision
from shardwright.units import format_bytes, format_seconds


def build_cluster(section: ClusterSection, world_size: int) -> Cluster:
    """Build the recipe's cluster with one device per rank.

    Raises:
        InputError: unknown devices or links, or a number of ranks that is not a multiple of a
            node's devices.
    """
    cluster = load_cluster(section.node, link=section.link, profile=section.profile)
    return resize_cluster(cluster, world_size)


@dataclass(frozen=True)
class PlannedRecipe:
    """Recipe with the layout that the planner chose for a cluster."""

    recipe: Recipe
    cluster: Cluster
    prediction: Prediction
    """Corrected by measured step times, if there are any."""
    uncorrected_seconds: float
    """Predicted step time without that correction, which compares numbers of ranks: `tune` may
    have measured only some of them."""
    correction_summary: str | None = None
    """Description of the measured step times that correct the choice. None: none do."""


def choose_layout(
    recipe: Recipe, cluster: Cluster, world_size: int, step_profile: StepProfile | None = None
) -> PlannedRecipe:
    """Choose layout, micro-batch, accumulation and recomputation of a recipe.

    Values that the recipe sets are kept.

    Args:
        step_profile: step times that `tune` measured on this cluster, which correct the choice as
            they correct `plan_recipe`.

    Raises:
        LayoutError: no layout that `train` can run fits.
    """
    shape = read_planning_shape(recipe)
    resolved = resolve_precision(recipe, choose_precision_on(cluster.accelerator))
    resolved = resolve_compilation_on(resolved, cluster.accelerator)
    problem = _build_run_problem(recipe, build_template(resolved), world_size, shape)
    predictor = build_predictor(get_recipe_facts(recipe, shape), cluster)
    correction = build_correction(step_profile, predictor, problem)
    result = search_run_layouts(predictor, problem)
    chosen = result.chosen
    if correction is not None:
        _, chosen = correction.correct_search(result, partial(_keeps_settings, recipe, problem))
    if chosen is None and "offload" not in recipe.model_fields_set:
        chosen = _choose_with_offload(predictor, problem, resolved)
        if chosen is not None and correction is not None:
            chosen = correction.apply(chosen)
    if chosen is None:
        raise _build_no_layout_error(predictor, problem)
    resolved = apply_compilation(recipe, chosen.candidate, problem.template)
    resolved = apply_candidate(resolved, chosen.candidate)
    if recipe.recompute_kind is None:
        # The layout fits with some kind; what its layers keep is chosen for the layout.
        resolved = resolved.model_copy(update={"recompute": recipe.recompute})
    return PlannedRecipe(
        resolved,
        cluster,
        chosen,
        predictor.predict(chosen.candidate).time.step,
        describe_measurements(step_profile, correction),
    )


def _build_run_problem(
    recipe: Recipe, template: Candidate, world_size: int, shape: ModelShape
) -> PlanningProblem:
    """Build the problem of the layouts that `train` can run, with the values that the recipe
    sets."""
    training = recipe.training
    problem = restrict_to_runnable(build_problem(recipe, template, world_size), shape)
    if training.global_batch_size is not None:
        problem = replace(
            problem,
            micro_batch_sizes=None
            if training.micro_batch_size is None
            else (training.micro_batch_size,),
            accumulation_steps=None
            if training.gradient_accumulation_steps is None
            else (training.gradient_accumulation_steps,),
        )
    if "recompute" in recipe.model_fields_set and recipe.recompute_kind is not None:
        problem = replace(problem, recompute_kinds=(recipe.recompute_kind,))
    return problem


def _keeps_settings(recipe: Recipe, problem: PlanningProblem, candidate: Candidate) -> bool:
    """Return True if measured settings have the values that the recipe sets, and `train` can run
    them. `tune` changes more settings than the search does."""
    template = problem.template
    sizes = problem.micro_batch_sizes
    steps = problem.accumulation_steps
    # Peers keep no copies of offloaded states.
    is_offload_open = "offload" not in recipe.model_fields_set and not recipe.elastic.peer_copies
    return (
        (sizes is None or candidate.micro_batch_size in sizes)
        and (steps is None or candidate.gradient_accumulation_steps in steps)
        and candidate.recompute in problem.recompute_kinds
        and (recipe.model.compile == "auto" or candidate.compile == template.compile)
        and (is_offload_open or candidate.offload == template.offload)
        and all(
            getattr(candidate.layout, name) == getattr(template.layout, name)
            for name in SETTINGS_WITH_AUTO & recipe.layout.model_fields_set
        )
        and (problem.is_allowed is None or problem.is_allowed(candidate))
    )


def _build_no_layout_error(predictor: Predictor, problem: PlanningProblem) -> LayoutError:
    larger = find_min_gpus(predictor, problem)
    remedy = "Shorten the sequence, unset recompute and micro_batch_size, or run `plan`"
    if larger is not None:
        remedy = f"Use {larger.num_gpus} devices: {larger.candidate.describe()}"
    capacity = format_bytes(predictor.cluster.accelerator.memory_bytes)
    return LayoutError(
        f"no layout that the recipe allows fits on {problem.num_gpus} devices of {capacity}",
        field="layout",
        got="auto",
        remedy=remedy,
    )


def choose_expert_dispatch(predictor: Predictor, candidate: Candidate) -> tuple[Candidate, str]:
    """Choose the exchange of `layout.expert_dispatch` whose predicted step is shortest.

    Returns:
        The candidate with that exchange, and the reason.
    """
    orders: tuple[ExpertDispatch, ...] = ("whole", "halves", "once_per_rank")
    predictions = [
        predictor.predict(
            replace(candidate, layout=replace(candidate.layout, expert_dispatch=order))
        )
        for order in orders
    ]
    chosen = min(predictions, key=lambda each: each.time.step)
    times = [
        f"{order} {format_seconds(each.time.step)}"
        for order, each in zip(orders, predictions, strict=True)
    ]
    # Waits of the host are not predicted, and nothing is known of the router's loads.
    others = "padded is not compared: it suits even loads of experts where the host delays the GPU"
    return chosen.candidate, f"predicted step: {', '.join(times)}; {others}"


def resolve_expert_dispatch(recipe: Recipe, plan: Plan, cluster: Cluster) -> Plan:
    """Return the plan with `layout.expert_dispatch: auto` resolved for its model and layout.

    Args:
        recipe: its precision must be resolved.
        cluster: devices, with at least as many as the plan has ranks.
    """
    predictor = build_predictor(get_recipe_facts(recipe, plan.shape.base_shape), cluster)
    candidate = build_plan_candidate(recipe, plan)
    chosen, reason = choose_expert_dispatch(predictor, candidate)
    return set_expert_dispatch(plan, chosen.layout.expert_dispatch, reason)


def set_expert_dispatch(plan: Plan, order: ExpertDispatch, reason: str) -> Plan:
    """Return the plan with the order that `layout.expert_dispatch: auto` resolves to."""
    placement = replace(plan.placement, layout=replace(plan.layout, expert_dispatch=order))
    return replace(plan, placement=placement, expert_dispatch_reason=reason)


def _choose_with_offload(
    predictor: Predictor, problem: PlanningProblem, recipe: Recipe
) -> Prediction | None:
    """Choose the best layout that fits with offloading; None if none does.

    One kind of state, whichever is the fastest, before two, before all three, and the host before
    the disk. Trained weights are offloaded with the optimizer states only. The memory of a CPU
    device is the host's, so offloading to the host frees none.
    """
    is_cpu = predictor.cluster.accelerator.kind == "cpu"
    tiers: tuple[OffloadTier, ...] = ("disk",) if is_cpu else ("host", "disk")
    for tier in tiers:
        kinds: dict[str, Any] = {
            "offload": OPTIMIZER_OFFLOADS[tier],
            "activation_offload": tier,
            "parameter_offload": tier,
        }
        for num_kinds in (1, 2, 3):
            templates = [
                _offload(recipe, problem.template, {name: kinds[name] for name in names})
                for names in combinations(kinds, num_kinds)
                if not (
                    "parameter_offload" in names
                    and "offload" not in names
                    and problem.template.adapter is None
                )
            ]
            results = [
                search_run_layouts(predictor, replace(problem, template=template), num_layouts=1)
                for template in templates
            ]
            found = [result.chosen for result in results if result.chosen is not None]
            if found:
                return min(found, key=lambda prediction: prediction.time.step)
    return None


def _offload(recipe: Recipe, template: Candidate, kinds: dict[str, Any]) -> Candidate:
    """Return the template with offloading, updated where a run of it will be."""
    candidate = replace(template, **kinds)
    offloaded = recipe.model_copy(update=_build_offload_section(recipe, candidate))
    place = choose_update_place(offloaded).place
    return replace(candidate, is_updated_on_host=place == "host")


def apply_compilation(recipe: Recipe, candidate: Candidate, template: Candidate) -> Recipe:
    """Return the recipe with the candidate's compilation written into it, if it is not what the
    recipe's `template` has."""
    if candidate.compile == template.compile:
        return recipe
    model = recipe.model.model_copy(update={"compile": candidate.compile})
    return recipe.model_copy(update={"model": model})


def apply_candidate(recipe: Recipe, candidate: Candidate) -> Recipe:
    """Return the recipe with the candidate's layout, batch and recomputation written into
    it."""
    layout = candidate.layout
    degrees: dict[str, Any] = {
        name: getattr(layout, name) for name in LayoutSection.model_fields if name != "auto"
    }
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
        | _build_offload_section(recipe, candidate)
    )


def _build_offload_section(recipe: Recipe, candidate: Candidate) -> dict[str, OffloadSection]:
    """Return the section of a candidate that offloads; none if the recipe has its own."""
    section = recipe.offload.change_tiers(
        optimizer=candidate.optimizer_tier,
        parameters=candidate.parameter_offload,
        activations=candidate.activation_offload,
    )
    if recipe.offload.is_enabled or not section.is_enabled:
        return {}
    return {"offload": section}
