"""Checks of runs that offload trained weights (`offload.parameters` without adapters)."""

from __future__ import annotations

from shardwright.config import Recipe
from shardwright.errors import RecipeError
from shardwright.launch.devices import should_use_cuda
from shardwright.plans import Plan


def check_trained_offload(recipe: Recipe, plan: Plan) -> None:
    """Check that a run without adapters can have its weights in a slower tier.

    Raises:
        RecipeError: something of the recipe is not covered; the message has what to do instead.
    """
    uses_cuda = should_use_cuda(recipe.run.device, field="run.device")
    is_updated_on_host = recipe.offload.update_on == "host" and uses_cuda
    refusals = (
        (
            recipe.offload.optimizer == "none",
            "trained weights return for the update with the moments, bucket by bucket",
            "none with offload.optimizer: none",
            "Set offload.optimizer: host or disk",
        ),
        (
            is_updated_on_host and recipe.offload.parameters == "disk",
            "trained weights on disk are updated on the device",
            "none or host with offload.update_on: host without adapters",
            "Set offload.parameters: host, or remove offload.update_on",
        ),
        (
            is_updated_on_host and recipe.model.keep_zeros,
            "zeros of matrices are restored on the device",
            "none with offload.update_on: host and model.keep_zeros",
            "Remove offload.update_on",
        ),
    )
    for is_refused, message, allowed, remedy in refusals:
        if is_refused:
            raise RecipeError(
                message,
                field="offload.parameters",
                got=recipe.offload.parameters,
                allowed=allowed,
                remedy=remedy,
            )
