"""Checks of `elastic.peer_copies` against offloading and host memory."""

from __future__ import annotations

import logging
from collections.abc import Collection

from shardwright.config import Recipe
from shardwright.errors import RecipeError
from shardwright.hardware.host_memory import read_available_memory
from shardwright.launch.rank_environment import detect_rank_environment
from shardwright.planner.peer_copy_costs import count_node_bytes, list_copied_parameters
from shardwright.planner.problem import build_plan_candidate
from shardwright.plans import Plan
from shardwright.units import format_bytes

logger = logging.getLogger(__name__)


def check_peer_copies(recipe: Recipe, plan: Plan, trained_names: Collection[str]) -> None:
    """Check, before any rank starts, that this node can hold the copies.

    Raises:
        RecipeError: the state is offloaded, there is one rank, or host memory is too small; the
            message has the numbers.
    """
    if not recipe.elastic.peer_copies:
        return
    for name in ("optimizer", "parameters"):
        tier = getattr(recipe.offload, name)
        if tier != "none":
            raise RecipeError(
                "copies of offloaded states are not kept in memory",
                field="elastic.peer_copies",
                got=1,
                allowed=f"0 with offload.{name}: {tier}",
                remedy=f"Set it to 0, or offload.{name}: none",
            )
    # Ranks find less memory, because earlier generations have filled theirs with copies.
    if detect_rank_environment() is not None:
        return
    world_size = plan.layout.world_size
    if world_size == 1:
        raise RecipeError(
            "a single rank has no peer that could keep its copy",
            field="elastic.peer_copies",
            got=1,
            allowed="0 with one rank",
            remedy="Set it to 0, or start several ranks with --nproc",
        )
    *_, needed_bytes = count_node_bytes(
        plan.placement,
        plan.layout,
        list_copied_parameters(plan.shape, build_plan_candidate(recipe, plan), trained_names),
        range(world_size),
        1,
    )
    available_bytes = read_available_memory()
    if available_bytes is not None and available_bytes < needed_bytes:
        raise RecipeError(
            "this node has not enough host memory for the copies of its ranks' states of two steps",
            field="elastic.peer_copies",
            got=f"1, with {format_bytes(available_bytes)} available",
            allowed=f"1 with at least {format_bytes(needed_bytes)}",
            remedy="Set it to 0",
        )
    logger.info("peer copies: %s of this node's host memory", format_bytes(needed_bytes))
