"""Recipe section of training on preferred and rejected responses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardwright.config.recipe_section import RecipeSection


class PreferenceSection(RecipeSection):
    """Preference tuning: the model learns which of two responses is preferred. The sources
    contain one pair of `chosen` and `rejected` responses per row; `training.global_batch_size`
    counts pairs."""

    kind: Literal["dpo"] = "dpo"
    """`dpo`: direct preference optimisation (Rafailov et al. 2023)."""
    beta: Annotated[float, Field(strict=True, gt=0)] = 0.1
    """Strength of the pull towards the reference model: larger values stay closer to it."""
    label_smoothing: Annotated[float, Field(strict=True, ge=0, lt=0.5)] = 0.0
    """Assumed fraction of pairs with swapped labels (conservative DPO)."""
    reference: Literal["frozen", "adapter_off"] | None = None
    """Reference model: `frozen` is a copy of the initial weights in the same layout;
    `adapter_off` is the model with its adapters disabled, which needs no extra memory. Default:
    `adapter_off` with `adapters`, else `frozen`."""
