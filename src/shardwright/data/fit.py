"""A recipe's model and its data, held against each other. No torch."""

from __future__ import annotations

from shardwright.architecture import ModelShape, read_config
from shardwright.config.schema import Recipe
from shardwright.data.prepare import Prepared, Progress, prepare

from shardwright.architecture.targets import with_adapters
_ANY_VOCABULARY = 1 << 20
"""Stands in for the tokenizer's size while there is no tokenizer: more ids than any has."""


def prepare_for_model(recipe: Recipe, *, progress: Progress | None = None) -> tuple[ModelShape, Prepared]:
    """The model's shape and the data that fits it; an inline config without `vocab_size` takes the tokenizer's.

    Raises:
        InputError: the model is refused, the sequence is longer than its positions, a token id does not fit its vocabulary, or
            the data cannot be prepared. What needs no data is found before any is read.
    """
    config = recipe.model.config if recipe.model.config is not None else recipe.model.path
    assert config is not None  # the schema demands one of them
    if isinstance(config, dict) and "vocab_size" not in config:
        _read(recipe, {**config, "vocab_size": _ANY_VOCABULARY})
        data = prepare(recipe, None, progress=progress)
        return _read(recipe, {**config, "vocab_size": data.tokenizer.vocab_size}), data
    shape = _read(recipe, config)
    return shape, prepare(recipe, shape.vocab_size, progress=progress)


def _read(recipe: Recipe, config: dict[str, object] | str) -> ModelShape:
    shape = read_config(config)
    shape.check_sequence_length(recipe.training.sequence_length)
    return with_adapters(shape, recipe.adapters)
