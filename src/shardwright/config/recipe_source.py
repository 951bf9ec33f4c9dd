"""Recipes in the forms in which the Python API takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardwright.config.recipe import Recipe
from shardwright.config.recipe_loading import build_recipe
from shardwright.config.recipe_loading import load_recipe as load_recipe_file
from shardwright.errors import InputError, LayoutError, RecipeError

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
            known key. Also for a source or a layout of another type.

    >>> load_recipe({"model": {"path": "my-model"}, "data": {"sources": "text.txt"}, "training": {
    ...     "sequence_length": 128, "max_steps": 10, "learning_rate": 1e-3,
    ...     "micro_batch_size": 1}}, layout="dp_shard=2,zero_stage=3").layout.zero_stage
    3
    """
    overrides = list_texts(overrides, "overrides")
    if layout is not None and not isinstance(layout, str):
        raise LayoutError(
            "not text", field="layout", got=repr(layout), allowed="e.g. 'tp=2,zero_stage=3'"
        )
    if isinstance(source, str | Path):
        return load_recipe_file(source, overrides, layout)
    if isinstance(source, Recipe):
        if not overrides and layout is None:
            return source
        source = source.model_dump(mode="json")
    if not isinstance(source, Mapping):
        raise RecipeError(
            "not a recipe",
            field="recipe",
            got=repr(source),
            allowed="the path of a YAML file, a mapping, or a Recipe",
        )
    return build_recipe(source, overrides, layout)


def list_texts(texts: Iterable[str], field: str) -> list[str]:
    """Return texts as a list; one text alone is a list of it, not of its characters.

    Args:
        field: name of the argument, for errors.

    Raises:
        InputError: something else than a text is among them.

    >>> list_texts("zero_stage=3", "layouts"), list_texts(("tp=2", "pp=2"), "layouts")
    (['zero_stage=3'], ['tp=2', 'pp=2'])
    """
    if isinstance(texts, str):
        return [texts]
    listed = list(texts) if isinstance(texts, Iterable) else [texts]
    if not all(isinstance(text, str) for text in listed):
        raise InputError("not texts", field=field, got=repr(texts), allowed="a text, or a list")
    return listed


def check_integer(number: int | None, field: str) -> None:
    """Check the type of an argument of the Python API; None is allowed.

    Raises:
        InputError: it is something else than a whole number.
    """
    if number is None:
        return
    if isinstance(number, bool) or not isinstance(number, int):
        raise InputError("not a whole number", field=field, got=repr(number), allowed="e.g. 2")
