"""Settings that the plan or the devices decide, resolved before ranks start: `layout`, `precision`,
`model.compile` and `recompute`."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from shardwright.architecture import HFShape
from shardwright.config import Recipe
from shardwright.config.layout import ClusterSection
from shardwright.config.recipe import RecomputeSection
from shardwright.errors import InputError, LayoutError, RecipeError
from shardwright.hardware.catalog_loading import find_accelerator, parse_cluster
from shardwright.launch.devices import should_use_cuda
from shardwright.launch.rank_environment import count_local_ranks
from shardwright.numerics.bf16 import choose_precision
from shardwright.numerics.compilation import choose_compilation, find_compiler_obstacle
from shardwright.placement.compilation import CompileChoice
from shardwright.planner.auto_layout import (
    PlannedRecipe,
    build_cluster,
    choose_layout,
    resolve_expert_dispatch,
    set_expert_dispatch,
)
from shardwright.planner.memory_settings import apply_memory_settings, resolve_on_empty_devices
from shardwright.planner.predictor import build_predictor
from shardwright.planner.problem import (
    build_plan_candidate,
    choose_precision_on,
    get_recipe_facts,
    resolve_compilation_on,
)
from shardwright.planner.recompute.choice import resolve_recompute
from shardwright.planner.scaling import resize_cluster
from shardwright.planner.step_profile import read_step_profile
from shardwright.plans import Plan, PrecisionChoice
from shardwright.units import format_bytes, format_count, format_seconds

logger = logging.getLogger("shardwright")


def resolve_auto_layout(recipe: Recipe, world_size: int) -> Recipe:
    """Return the recipe with `layout: auto` replaced by the layout that the planner chooses.

    The planner plans for the recipe's cluster, or for this machine's devices if it names none.
    A recipe with explicit degrees is returned unchanged. The choice depends on the recipe, the
    number of ranks, the kind of device, and the step times that `tune` measured on this machine.
    Ranks that a launcher has started choose by themselves and then compare their choices
    (`training.checks.auto_choice.check_equal_layouts`).

    Raises:
        InputError: No cluster is named and the catalogue does not know this machine's GPU, or the
            file of measured step times is damaged.
        LayoutError: No layout fits, or no cluster is named and this machine has no GPU.
    """
    if not recipe.layout.auto:
        return recipe
    planned = plan_ranks(recipe, world_size)
    logger.info("%s", describe_choice(planned))
    if planned.prediction.warning is not None:
        logger.warning(
            "layout auto: no layout fits with memory to spare; the chosen one %s",
            planned.prediction.warning,
        )
    return planned.recipe


def plan_ranks(recipe: Recipe, world_size: int) -> PlannedRecipe:
    """Choose the layout of a recipe with `layout: auto` for a number of ranks.

    Step times that `tune` measured on the same cluster correct the choice, as in `plan`.

    Raises:
        InputError, LayoutError: As `resolve_auto_layout`.
    """
    section = recipe.cluster or detect_cluster(recipe, world_size)
    cluster = build_cluster(section, world_size)
    planned = choose_layout(recipe, cluster, world_size, read_step_profile(cluster))
    return replace(planned, recipe=planned.recipe.model_copy(update={"cluster": section}))


def describe_choice(planned: PlannedRecipe) -> str:
    """Describe the planner's choice and its prediction in one line."""
    prediction = planned.prediction
    candidate = prediction.candidate
    source = "measured" if prediction.is_measured else "predicted"
    correction = planned.correction_summary
    return (
        f"layout auto on {planned.cluster.name}: {candidate.describe()}, micro batch "
        f"{candidate.micro_batch_size} x {candidate.gradient_accumulation_steps}, "
        f"recompute {candidate.recompute}; {source} {format_seconds(prediction.time.step)} per "
        f"step, {format_count(prediction.tokens_per_second)} tokens/s, "
        f"{format_bytes(prediction.memory.total)} per device"
        + ("" if correction is None else f"; {correction}")
    )


def choose_precision_here(recipe: Recipe) -> PrecisionChoice:
    """Resolve `precision: auto` for the device of this machine on which the recipe runs.

    Raises:
        InputError: The recipe requests CUDA, and this machine has no CUDA device.
    """
    return choose_precision(_get_device_here(recipe))


def choose_compilation_here(recipe: Recipe) -> CompileChoice | None:
    """Resolve `auto` of `model.compile` and `model.fused_pointwise` for this machine's device.

    Returns None if the recipe sets both.

    Raises:
        InputError: The recipe requests CUDA, and this machine has no CUDA device.
        RecipeError: The recipe compiles blocks or functions, and torch.compile cannot compile for
            the device.
    """
    model = recipe.model
    named = [
        field
        for field in ("compile", "compile_functions", "fused_pointwise")
        if getattr(model, field) in (True, "compiled", "loss")
    ]
    is_auto = "auto" in (model.compile, model.fused_pointwise)
    if not named and not is_auto:
        return None
    device = _get_device_here(recipe)
    for field in named:
        obstacle = find_compiler_obstacle(device)
        if obstacle is not None:
            raise RecipeError(
                f"torch.compile cannot compile for {device.type}: {obstacle}",
                field=f"model.{field}",
                got=str(getattr(model, field)).lower(),
                allowed="auto or none" if field == "fused_pointwise" else "auto or false",
                remedy=f"Install what is missing, or leave model.{field} at auto",
            )
    return choose_compilation(device) if is_auto else None


def _get_device_here(recipe: Recipe) -> torch.device:
    return torch.device("cuda" if should_use_cuda(recipe.run.device, field="run.device") else "cpu")


def choose_planned_precision(recipe: Recipe) -> PrecisionChoice | None:
    """Resolve `precision: auto` for the recipe's cluster, or for this machine if it names none.

    Returns None if the precision is not `auto`. For verbs that run nothing on those devices.

    Raises:
        InputError: The catalogue does not know the cluster.
    """
    if recipe.precision.kind != "auto":
        return None
    if recipe.cluster is not None:
        return choose_precision_on(build_cluster(recipe.cluster, 1).accelerator)
    if recipe.run.device == "cuda" and not torch.cuda.is_available():
        return PrecisionChoice(
            "bf16",
            "run.device is cuda; CUDA devices from compute capability 8.0 multiply bf16 natively",
        )
    return choose_precision_here(recipe)


def resolve_recompute_here(recipe: Recipe, plan: Plan) -> Plan:
    """Resolve `recompute: auto` or a budget for the recipe's cluster, or for this machine.

    Depends only on the recipe, the plan and the kind of device, so every rank chooses the same.

    Raises:
        InputError: No cluster is named and the catalogue does not know this machine's GPU.
        RecipeError: No choice fits, the plan cannot choose for this model, or `auto` on a CPU
            without a cluster, so that its memory is unknown.
    """
    if recipe.recompute_kind is not None:
        return plan
    world_size = plan.layout.world_size
    if recipe.cluster is not None:
        cluster = build_cluster(recipe.cluster, world_size)
    elif recipe.run.device == "cpu" or not torch.cuda.is_available():
        if recipe.recompute == RecomputeSection():
            raise RecipeError(
                "this machine has no GPU whose memory the plan could fill",
                field="recompute",
                got="auto",
                allowed="none, selective, full, {budget_gib: N}",
                remedy="Name the memory to use (`recompute: {budget_gib: N}`), or the cluster to "
                "plan for (`cluster: 8xH100-80GB`)",
            )
        cluster = resize_cluster(parse_cluster("1xcpu"), world_size)
    else:
        cluster = build_cluster(detect_cluster(recipe, world_size, "recompute"), world_size)
    settled = recipe.model_copy(update={"precision": plan.precision})
    return resolve_recompute(settled, plan, cluster)


def take_planned_memory(recipe: Recipe, plan: Plan) -> tuple[Recipe, Plan, tuple[str, ...]]:
    """Resolve the settings that take free memory as a run on the recipe's cluster does, if it names
    one of GPUs; also return a line for each.

    Raises:
        InputError: The catalogue does not know the cluster.
    """
    if recipe.cluster is None or isinstance(plan.shape, HFShape):
        return recipe, plan, ()
    cluster = build_cluster(recipe.cluster, plan.layout.world_size)
    model = resolve_compilation_on(recipe, cluster.accelerator).model
    settled = recipe.model_copy(update={"precision": plan.precision})
    candidate = replace(
        build_plan_candidate(settled, plan),
        compile=bool(model.compile),
        has_fused_functions=model.fused_pointwise == "compiled",
    )
    predictor = build_predictor(get_recipe_facts(recipe, plan.shape.base_shape), cluster)
    resolved, lines = resolve_on_empty_devices(predictor, candidate)
    return *apply_memory_settings(recipe, plan, candidate, resolved), lines


def resolve_expert_dispatch_here(recipe: Recipe, plan: Plan) -> Plan:
    """Resolve `layout.expert_dispatch: auto` for the recipe's cluster, or for this machine's GPUs.

    Depends only on the recipe, the plan and the kind of device, so every rank chooses the same.

    Raises:
        InputError: No cluster is named and the catalogue does not know this machine's GPU.
    """
    if plan.layout.expert_dispatch != "auto":
        return plan
    section = recipe.cluster
    if section is None:
        if recipe.run.device == "cpu" or not torch.cuda.is_available():
            return set_expert_dispatch(
                plan, "whole", "the recipe names no cluster and this machine has no GPU to predict"
            )
        section = detect_cluster(recipe, plan.layout.world_size, "layout.expert_dispatch")
    settled = recipe.model_copy(update={"precision": plan.precision})
    return resolve_expert_dispatch(settled, plan, build_cluster(section, plan.layout.world_size))


def detect_cluster(recipe: Recipe, world_size: int, field: str = "layout") -> ClusterSection:
    """Describe this machine's GPUs as a recipe's cluster section, one device per local rank.

    `field` is the key of the recipe that errors name.

    Raises:
        LayoutError: This machine has no GPU; the planner has no model of CPUs.
        InputError: The catalogue does not know the GPU.
    """
    if recipe.run.device == "cpu" or not torch.cuda.is_available():
        raise LayoutError(
            "this machine has no GPU to plan for",
            field=field,
            got="auto",
            remedy="Name the cluster to plan for (`cluster: 8xH100-80GB`), or give the degrees",
        )
    name = torch.cuda.get_device_name()
    local = count_local_ranks() or min(world_size, torch.cuda.device_count())
    try:
        accelerator = find_accelerator(name)
    except InputError as error:
        remedy = (
            "Name the closest GPU (`cluster: 8xH100-80GB`), "
            "or measure this one (`shardwright doctor --calibrate`)"
        )
        raise InputError(
            "the catalogue does not know this GPU",
            field=field,
            got=name,
            allowed=error.allowed,
            remedy=remedy,
        ) from None
    return ClusterSection(node=f"{local}x{accelerator.name}")
