"""A recipe's model and its data, held against each other. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwright.architecture import ModelShape, read_config
from shardwright.architecture.targets import with_adapters
from shardwright.config.schema import Recipe
from shardwright.data.prepare import Prepared, Progress, prepare

_ANY_VOCABULARY = 1 << 20
"""Stands in for the tokenizer's size while there is no tokenizer: more ids than any has."""


ReadShape = Callable[[Mapping[str, Any] | str], ModelShape]
"""A config.json's content, or the folder that holds it -> the model."""


def prepare_for_model(
    recipe: Recipe, read: ReadShape = read_config, *, progress: Progress | None = None
) -> tuple[ModelShape, Prepared]:
    """The model's shape, with its adapters, and the data that fits it; an inline config without `vocab_size` takes the tokenizer's.

    Args:
        read: `read_config` knows our own decoder's families only.

    Raises:
        InputError: the model is refused, the sequence is longer than its positions, a token id does not fit its vocabulary, or
            the data cannot be prepared. What needs no data is found before any is read.
    """
    config = recipe.model.config if recipe.model.config is not None else recipe.model.path
    assert config is not None  # the schema demands one of them
    if isinstance(config, dict) and "vocab_size" not in config:
        _read(recipe, {**config, "vocab_size": _ANY_VOCABULARY}, read)
        data = prepare(recipe, None, progress=progress)
        return _read(recipe, {**config, "vocab_size": data.tokenizer.vocab_size}, read), data
    shape = _read(recipe, config, read)
    return shape, prepare(recipe, shape.vocab_size, progress=progress)


def _read(recipe: Recipe, config: dict[str, Any] | str, read: ReadShape) -> ModelShape:
    shape = read(config)
    shape.check_sequence_length(recipe.training.sequence_length)
    return with_adapters(shape, recipe.adapters)
