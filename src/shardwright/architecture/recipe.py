"""Model shape of a recipe, without reading its tokenizer or weights."""

from __future__ import annotations

from typing import Any

from shardwright.architecture.reading import read_config, read_content
from shardwright.architecture.shape import ModelShape
from shardwright.architecture.targets import with_adapters
from shardwright.config import Recipe

STAND_IN_VOCABULARY = 257
"""Vocabulary size if only the tokenizer, which is not built here, determines it."""


def shape_of(recipe: Recipe) -> ModelShape:
    """Read the shape of the recipe's model, with its adapters.

    If the model's configuration has no vocab_size, `tokenizer.vocab_size` of the recipe is
    used, or `STAND_IN_VOCABULARY`.
    """
    return with_adapters(read_config(config_of(recipe)), recipe.adapters)


def config_of(recipe: Recipe) -> dict[str, Any]:
    """Read the model's config.json fields, with a vocab_size as in `shape_of`."""
    config = recipe.model.config if recipe.model.config is not None else recipe.model.path
    assert config is not None  # the schema requires one of them
    if isinstance(config, dict) and "vocab_size" not in config:
        config = {**config, "vocab_size": recipe.tokenizer.vocab_size or STAND_IN_VOCABULARY}
    return read_content(config)
