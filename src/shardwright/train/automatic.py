"""`layout: auto` before ranks start: which devices are here, and the planner's choice for them."""

from __future__ import annotations

import logging
import os

import torch

from shardwright.config import Recipe
from shardwright.config.layout import ClusterSection
from shardwright.errors import InputError, LayoutError
from shardwright.hardware.load import find_accelerator
from shardwright.planner.automatic import choose_layout, cluster_of
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
