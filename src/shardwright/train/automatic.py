"""`layout: auto` and `precision: auto` before ranks start: which devices are here, and what is chosen for them."""

from __future__ import annotations

import logging
import os

import torch

from shardwright.config import Recipe
from shardwright.config.layout import ClusterSection
from shardwright.errors import InputError, LayoutError
from shardwright.hardware.load import find_accelerator, parse_cluster
from shardwright.numerics.bf16 import choose_precision
from shardwright.plan import PrecisionChoice
from shardwright.planner.automatic import choose_layout, cluster_of
from shardwright.planner.question import choose_precision_on
from shardwright.train.devices import wants_cuda
from shardwright.units import format_bytes, format_count, format_seconds

logger = logging.getLogger("shardwright")


def resolve_auto(recipe: Recipe, world_size: int) -> Recipe:
    """The recipe with the layout that the planner chose for its cluster, or for this machine's devices; others as they are.

    Every rank comes to the same choice: it depends on the recipe, the number of ranks and the kind of device only.

    Raises:
        InputError: no cluster is named and this machine has no GPU that the catalogue knows.
        LayoutError: nothing fits.
    """
    if not recipe.layout.auto:
        return recipe
    section = recipe.cluster or cluster_here(recipe, world_size)
    cluster = cluster_of(section, world_size)
    chosen, prediction = choose_layout(recipe, cluster, world_size)
    logger.info(
        "layout auto on %s: %s, micro batch %d x %d, recompute %s; predicted %s a step, %s tokens/s, %s a device",
        cluster.name,
        prediction.candidate.describe(),
        prediction.candidate.micro_batch_size,
        prediction.candidate.gradient_accumulation_steps,
        prediction.candidate.recompute,
        format_seconds(prediction.time.step),
        format_count(prediction.tokens_per_second),
        format_bytes(prediction.memory.total),
    )
    if prediction.warning is not None:
        logger.warning("layout auto: nothing fits with room to spare, and the chosen layout %s", prediction.warning)
    return chosen.model_copy(update={"cluster": section})


def choose_precision_here(recipe: Recipe) -> PrecisionChoice:
    """What `precision: auto` means on the device of this machine on which the recipe runs.

    Raises:
        InputError: the recipe wants CUDA, and this machine has none.
    """
    return choose_precision(torch.device("cuda" if wants_cuda(recipe.run.device, field="run.device") else "cpu"))


def choose_planned_precision(recipe: Recipe) -> PrecisionChoice | None:
    """What `precision: auto` means on the cluster that the recipe names, or else on this machine; None if it is not `auto`.

    For what runs nothing on the recipe's devices.

    Raises:
        InputError: the catalogue does not know the cluster.
    """
    if recipe.precision.kind != "auto":
        return None
    if recipe.cluster is not None:
        return choose_precision_on(parse_cluster(recipe.cluster.node).accelerator)
    if recipe.run.device == "cuda" and not torch.cuda.is_available():
        return PrecisionChoice("bf16", "run.device is cuda, and CUDA devices from compute capability 8.0 on multiply bf16 natively")
    return choose_precision_here(recipe)


def cluster_here(recipe: Recipe, world_size: int) -> ClusterSection:
    """This machine's GPUs as a recipe would name them, as many a node as ranks run on each.

    Raises:
        LayoutError: there is none: the planner does not guess what a CPU does.
        InputError: a GPU that the catalogue does not know.
    """
    if recipe.run.device == "cpu" or not torch.cuda.is_available():
        raise LayoutError(
            "this machine has no GPU to plan for",
            field="layout",
            got="auto",
            remedy="Name what is planned for (`cluster: 8xH100-80GB`), or give the degrees",
        )
    name = torch.cuda.get_device_name()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or min(world_size, torch.cuda.device_count())
    try:
        accelerator = find_accelerator(name)
    except InputError as error:
        remedy = "Name the nearest (`cluster: 8xH100-80GB`), or measure this one (`shardwright doctor --calibrate`)"
        raise InputError(
            "the catalogue does not know this GPU", field="layout", got=name, allowed=error.allowed, remedy=remedy
        ) from None
    return ClusterSection(node=f"{local}x{accelerator.name}")
