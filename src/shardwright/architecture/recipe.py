"""The shape of a recipe's model, from the recipe alone."""

from __future__ import annotations

from typing import Any

from shardwright.architecture.reading import read_config, read_content
from shardwright.architecture.shape import ModelShape
from shardwright.architecture.targets import with_adapters
from shardwright.config import Recipe

STAND_IN_VOCABULARY = 257
"""For a recipe whose vocabulary is its tokenizer's, which is not built here."""


def shape_of(recipe: Recipe) -> ModelShape:
    """The recipe's model, with its adapters.

    A vocabulary that only the tokenizer knows is the size it is asked to have, or `STAND_IN_VOCABULARY`.
    """
    return with_adapters(read_config(config_of(recipe)), recipe.adapters)


def config_of(recipe: Recipe) -> dict[str, Any]:
    """The fields of the model's config.json, with a vocabulary as `shape_of` has it."""
    config = recipe.model.config if recipe.model.config is not None else recipe.model.path
    assert config is not None  # the schema demands one of them
    if isinstance(config, dict) and "vocab_size" not in config:
        config = {**config, "vocab_size": recipe.tokenizer.vocab_size or STAND_IN_VOCABULARY}
    return read_content(config)
