"""Recipe of a run for each number of ranks that it continues with.

Degrees in the recipe stay: only a data degree that is open shrinks and grows. With `layout: auto`
the planner chooses the layout for every number again, with the same global batch.
"""

from __future__ import annotations

import logging

from shardwright.config import Recipe
from shardwright.errors import InputError, RecipeError
from shardwright.launch.elastic import find_smaller_world_size
from shardwright.launch.node_place import count_ranks, find_node_place
from shardwright.plans import resolve_degrees

logger = logging.getLogger("shardwright")


class WorldSizes:
    """Numbers of ranks on which a run can continue, and its recipe for each."""

    def __init__(self, recipe: Recipe, world_size: int, planned_from: Recipe | None = None) -> None:
        """
        Args:
            recipe: Recipe of the first ranks, with their layout.
            world_size: Number of the first ranks.
            planned_from: Recipe with `layout: auto` from which the planner chose that layout;
                None if the recipe has degrees.
        """
        self._recipe = recipe
        self._world_size = world_size
        self._planned_from = planned_from
        self._planned: dict[int, Recipe] = {}

    def check(self) -> None:
        """Check that `elastic.min_ranks` can take effect. Plans nothing for `layout: auto`.

        Raises:
            RecipeError: It exceeds the number of ranks, or no smaller number has the recipe's
                degrees and global batch.
        """
        min_ranks = self._recipe.elastic.min_ranks
        if min_ranks is None or min_ranks == self._world_size:
            return
        if min_ranks > self._world_size:
            raise RecipeError(
                "the run starts with fewer ranks",
                field="elastic.min_ranks",
                got=min_ranks,
                allowed=f"at most {self._world_size}, the number of ranks",
                remedy="Lower it, or start more ranks (--nproc)",
            )
        if (
            self._planned_from is None
            and find_smaller_world_size(self._recipe, self._world_size) is None
        ):
            raise RecipeError(
                f"no number of ranks from {min_ranks} to {self._world_size - 1} satisfies the "
                "recipe's degrees and global batch",
                field="elastic.min_ranks",
                got=min_ranks,
                allowed="null, a smaller number, or unset data-parallel degrees and accumulation",
                remedy="Leave layout.dp_shard (or dp_replicate) and "
                "training.gradient_accumulation_steps unset, or use layout: auto",
            )

    def get_recipe(self, world_size: int) -> Recipe:
        """Return the recipe for a number of ranks: the first, or one that `find_smaller` found."""
        return self._planned.get(world_size, self._recipe)

    def find_smaller(self, world_size: int) -> int | None:
        """Find the number of ranks, below `world_size`, that continues; None if there is none.

        The largest that the degrees allow; with `layout: auto` the one whose predicted step is
        the shortest.
        """
        min_ranks = self._recipe.elastic.min_ranks
        if min_ranks is None:
            return None
        if self._planned_from is None:
            return find_smaller_world_size(self._recipe, world_size)
        chosen = self._plan(range(world_size - 1, min_ranks - 1, -1))
        if chosen is None:
            logger.warning(
                "layout auto: no layout for %d to %d ranks with the same global batch fits, so "
                "%d ranks start again",
                min_ranks,
                world_size - 1,
                world_size,
            )
        return chosen

    def _plan(self, counts: range) -> int | None:
        """Plan these numbers of ranks; return the one with the shortest predicted step."""
        # Imports torch, which a recipe with degrees does not need here.
        from shardwright.launch.auto_layout import describe_choice, plan_ranks

        assert self._planned_from is not None
        _, batch = resolve_degrees(self._recipe, self._world_size)
        training = self._planned_from.training.model_copy(
            update={"global_batch_size": batch.global_batch_size}
        )
        recipe = self._planned_from.model_copy(
            update={"training": training, "cluster": self._recipe.cluster}
        )
        plans = {}
        for count in counts:
            try:
                planned = plan_ranks(recipe, count)
            except InputError:  # no layout fits, or the cluster has no such number of devices
                continue
            offload = planned.recipe.offload
            if recipe.elastic.peer_copies and (offload.optimizer, offload.parameters) != (
                "none",
                "none",
            ):
                continue  # fits only with states offloaded, of which no copies are kept
            plans[count] = planned
        if not plans:
            return None
        best = min(plans, key=lambda count: plans[count].uncorrected_seconds)
        logger.info("%s", describe_choice(plans[best]))
        self._planned[best] = plans[best].recipe
        return best


def resolve_training_layout(recipe: Recipe, num_ranks: int | None) -> tuple[Recipe, int]:
    """Return the recipe with layout `auto` resolved, and the number of ranks that train it.

    A launcher's number of ranks goes before `num_ranks`, whose default is 1; see `count_ranks`.

    Raises:
        InputError: degrees or batch sizes that contradict each other or the number of ranks.
    """
    world_size = count_ranks(recipe.elastic, num_ranks)
    if recipe.layout.auto:
        if recipe.cluster is None and find_node_place(recipe.elastic, num_ranks) is not None:
            raise InputError(
                "how the ranks of several nodes are connected is not known",
                field="cluster",
                remedy="Describe the nodes in `cluster`, or write the degrees of `layout`",
            )
        from shardwright.launch.auto_layout import resolve_auto_layout

        recipe = resolve_auto_layout(recipe, world_size)
    resolve_degrees(recipe, world_size)
    return recipe, world_size
