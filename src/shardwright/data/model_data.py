"""Model shape and data of a recipe, checked for compatibility. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwright.architecture import ModelShape, read_config
from shardwright.architecture.adapter_targets import add_adapters
from shardwright.config.recipe import Recipe
from shardwright.data.preparation import prepare_data
from shardwright.data.prepared_data import PreparedData
from shardwright.data.sources.source_files import ProgressCallback

_PLACEHOLDER_VOCAB_SIZE = 1 << 20
"""Vocabulary size used before the tokenizer is known; larger than that of any tokenizer."""


ReadShape = Callable[[Mapping[str, Any] | str], ModelShape]
"""Function from the content of a config.json, or its folder, to the model's shape."""


def prepare_for_model(
    recipe: Recipe, read_shape: ReadShape = read_config, *, progress: ProgressCallback | None = None
) -> tuple[ModelShape, PreparedData]:
    """Return the model's shape with adapters, and its prepared data.

    An inline config without `vocab_size` takes the tokenizer's vocabulary size.

    Args:
        read_shape: reads the model's config; `read_config` supports the families of our own
            decoder only.

    Raises:
        InputError: unsupported model, sequence longer than the model's positions, token id
            outside its vocabulary, or data that cannot be prepared. Checks that need no data
            come first.
    """
    config = recipe.model.config if recipe.model.config is not None else recipe.model.path
    assert config is not None  # the schema requires one of them
    if isinstance(config, dict) and "vocab_size" not in config:
        _read_shape(recipe, {**config, "vocab_size": _PLACEHOLDER_VOCAB_SIZE}, read_shape)
        data = prepare_data(recipe, None, progress=progress)
        return _read_shape(
            recipe, {**config, "vocab_size": data.tokenizer.vocab_size}, read_shape
        ), data
    shape = _read_shape(recipe, config, read_shape)
    return shape, prepare_data(recipe, shape.vocab_size, progress=progress)


def _read_shape(recipe: Recipe, config: dict[str, Any] | str, read_shape: ReadShape) -> ModelShape:
    shape = read_shape(config)
    shape.check_sequence_length(recipe.training.sequence_length)
    return add_adapters(shape, recipe.adapters)
