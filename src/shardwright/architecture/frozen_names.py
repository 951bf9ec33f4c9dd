"""Parameters that a recipe freezes: patterns of `model.freeze`."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shardwright.architecture.flop_count import find_first_trained_block
from shardwright.architecture.model_shape import ModelShape
from shardwright.errors import RecipeError


def match_frozen(patterns: Sequence[str], shape: ModelShape) -> frozenset[str]:
    """Return the names of the model's parameters that match any of the patterns.

    Raises:
        RecipeError: a pattern matches no parameter, or they match all.
    """
    names = [spec.name for spec in shape.list_parameters()]
    frozen: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise RecipeError(
                "matches no parameter",
                field="model.freeze",
                got=pattern,
                allowed=f"a pattern such as {names[0]} or *.{names[-1].split('.')[-1]}",
            )
        frozen.update(matched)
    if frozen and len(frozen) == len(names):
        raise RecipeError(
            "every parameter would be frozen", field="model.freeze", got=", ".join(patterns)
        )
    return frozenset(frozen)


@dataclass(frozen=True)
class LayerTraining:
    """Part of a layer that is trained. Equal layers are trained alike if theirs are equal."""

    frozen_places: frozenset[int] = frozenset()
    """Places of frozen parameters among those of the layer."""
    has_backward: bool = True
    """False if no gradient passes through the layer: it and all below it are frozen."""


def list_layer_training(
    shape: ModelShape, frozen_names: Collection[str]
) -> tuple[LayerTraining, ...]:
    """List what is trained of each layer of a model."""
    specs = shape.list_parameters()
    trained = {spec.name for spec in specs if spec.is_trained and spec.name not in frozen_names}
    first_block = find_first_trained_block(specs, trained)
    frozen_places: list[set[int]] = [set() for _ in shape.layers]
    num_parameters = [0] * shape.num_layers
    for spec in specs:
        if spec.layer is not None:
            if spec.name in frozen_names:
                frozen_places[spec.layer].add(num_parameters[spec.layer])
            num_parameters[spec.layer] += 1
    return tuple(
        LayerTraining(frozenset(places), has_backward=layer >= first_block)
        for layer, places in enumerate(frozen_places)
    )
