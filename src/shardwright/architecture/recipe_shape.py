"""Model shape of a recipe, without reading its tokenizer or weights."""

from __future__ import annotations

from typing import Any

from shardwright.architecture.adapter_targets import add_adapters
from shardwright.architecture.config_reading import read_config, read_content
from shardwright.architecture.model_shape import ModelShape
from shardwright.config import Recipe

PLACEHOLDER_VOCAB_SIZE = 257
"""Vocabulary size if only the tokenizer, which is not built here, determines it."""


def read_recipe_shape(recipe: Recipe) -> ModelShape:
    """Read the shape of the recipe's model, with its adapters.

    If the model's configuration has no vocab_size, `tokenizer.vocab_size` of the recipe is
    used, or `PLACEHOLDER_VOCAB_SIZE`.
    """
    return add_adapters(read_config(read_recipe_config(recipe)), recipe.adapters)


def read_recipe_config(recipe: Recipe) -> dict[str, Any]:
    """Read the model's config.json fields, with a vocab_size as in `read_recipe_shape`."""
    config = recipe.model.config if recipe.model.config is not None else recipe.model.path
    assert config is not None  # the schema requires one of them
    if isinstance(config, dict) and "vocab_size" not in config:
        config = {**config, "vocab_size": recipe.tokenizer.vocab_size or PLACEHOLDER_VOCAB_SIZE}
    return read_content(config)
