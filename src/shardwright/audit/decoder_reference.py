"""Second reference of an audit: our own decoder, where it implements the recorded family.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from shardwright.audit.batch_reading import PaddedRows
from shardwright.audit.parameter_places import ParameterPlace, ParameterPlaces
from shardwright.model import Decoder

logger = logging.getLogger("shardwright")


def compute_decoder_gradients(
    locations: ParameterPlaces,
    weights: Mapping[str, Tensor],
    rows: PaddedRows,
    *,
    padding_row: int | None,
    dtype: torch.dtype,
) -> dict[str, Tensor] | None:
    """Compute the gradients of the summed token losses of rows of single documents.

    Args:
        locations: Places of parameters in transformers' class.
        weights: Weights of transformers' class by name.
        rows: The rows, padded.
        padding_row: Row of the embedding that gets no gradient.
        dtype: Precision of the computation.

    Returns:
        Gradients by the names of transformers' class; None if the decoder does not implement this
        model, or has other parameters.
    """
    shape = locations.decoder_shape
    if shape is None:
        return None
    decoder = Decoder(shape, attention="explicit", compute_dtype=dtype).to(dtype)
    decoder.embedding.padding_row = padding_row
    parameters = dict(decoder.named_parameters())
    places: dict[str, ParameterPlace] = {}
    for name, parameter in parameters.items():
        place = locations.find(name)
        if place is not None and place.shape == tuple(parameter.shape):
            places[name] = place
    owners = {owner for place in places.values() for owner in place.owners}
    if places.keys() != parameters.keys() or owners != weights.keys():
        logger.info("our decoder does not check the reference: its parameters differ")
        return None
    with torch.no_grad():
        for name, place in places.items():
            value = place.gather(weights)
            assert value is not None, name
            parameters[name].copy_(value)
    ids, positions, targets, _ = rows
    decoder.eval()(ids, positions_BT=positions, labels_BT=targets).backward()
    gradients = {name: torch.zeros_like(value) for name, value in weights.items()}
    for name, place in places.items():
        gradient = parameters[name].grad
        if gradient is not None:
            place.scatter(gradient, gradients)
    return gradients
