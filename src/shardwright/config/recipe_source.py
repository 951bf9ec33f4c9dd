"""Recipes in the forms in which the Python API takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardwright.config.recipe import Recipe
from shardwright.config.recipe_loading import build_recipe
from shardwright.config.recipe_loading import load_recipe as load_recipe_file

RecipeSource = Recipe | str | Path | Mapping[str, Any]
"""Recipe, path of a YAML file, or mapping with the keys of a recipe."""


def load_recipe(
    source: RecipeSource, *, overrides: Iterable[str] = (), layout: str | None = None
) -> Recipe:
    """Read and validate a recipe.

    Args:
        source: path of a YAML file, a mapping with the same keys, or a recipe.
        overrides: `section.key=value` as in `--set`; values are YAML.
        layout: `tp=2,zero_stage=3` as in `--layout`; replaces the whole layout of the recipe.

    Raises:
        RecipeError, LayoutError: with the field, the value, the allowed values and the closest
            known key.

    >>> load_recipe({"model": {"path": "my-model"}, "data": {"sources": "text.txt"}, "training": {
    ...     "sequence_length": 128, "max_steps": 10, "learning_rate": 1e-3,
    ...     "micro_batch_size": 1}}, layout="dp_shard=2,zero_stage=3").layout.zero_stage
    3
    """
    overrides = list(overrides)
    if isinstance(source, str | Path):
        return load_recipe_file(source, overrides, layout)
    if isinstance(source, Recipe):
        if not overrides and layout is None:
            return source
        source = source.model_dump(mode="json")
    return build_recipe(source, overrides, layout)
