"""Parameters of a rank: their dtypes, their shapes and their values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardwright.architecture import HFShape
from shardwright.layout import (
    Layout,
    ParameterLayout,
    compute_local_boxes,
    compute_local_shape,
)
from shardwright.model.block_weights import SliceReader
from shardwright.model.decoder import Decoder
from shardwright.numerics import get_local_tensor
from shardwright.numerics.precision import PrecisionDtypes
from shardwright.parallel.gradient_reduction import narrow_to_box


def set_dtypes(decoder: Decoder, precision: PrecisionDtypes) -> None:
    """Store parameters in the precision of master weights, or in what they need.

    Untrained biases of routers are in fp32 at least: their steps are too small for 16 bits.
    """
    decoder.to(precision.param)
    _cast_frozen(decoder, precision.compute)
    if precision.param != torch.bfloat16:
        return
    trained = {spec.name: spec.is_trained for spec in decoder.shape.list_parameters()}
    for name, parameter in decoder.named_parameters():
        if not trained[name]:
            parameter.data = parameter.data.to(torch.float32)


def narrow_parameters(
    decoder: Decoder,
    layouts: Mapping[str, ParameterLayout],
    layout: Layout,
    coordinates: Mapping[str, int],
) -> None:
    """Replace parameters that tp or ep shards with ones of this rank's shape, without memory."""
    names = {parameter: name for name, parameter in decoder.named_parameters()}
    for module in decoder.modules():
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            parameter_layout = layouts[names[parameter]]
            shape = compute_local_shape(parameter_layout, layout, coordinates, with_zero=False)
            if shape != tuple(parameter.shape):
                local = parameter.new_empty(shape)
                setattr(module, attribute, nn.Parameter(local, parameter.requires_grad))


@torch.no_grad()
def fill_parameters(
    decoder: Decoder,
    layouts: Mapping[str, ParameterLayout],
    layout: Layout,
    coordinates: Mapping[str, int],
    read_slice: SliceReader,
) -> None:
    """Fill the parameters that `layouts` names."""
    for name, parameter in decoder.named_parameters():
        if name not in layouts:
            continue
        local = get_local_tensor(parameter)
        parameter_layout = layouts[name]
        # Our own invariant: sharding and FSDP2 left exactly the shape that the descriptor
        # states.
        assert tuple(local.shape) == compute_local_shape(parameter_layout, layout, coordinates), (
            f"{name}: has local shape {tuple(local.shape)}, expected {parameter_layout}"
        )
        for box in compute_local_boxes(parameter_layout, layout, coordinates):
            narrow_to_box(local, box.local_bounds).copy_(read_slice(name, box.global_bounds))


def _cast_frozen(decoder: Decoder, dtype: torch.dtype) -> None:
    """Cast frozen matrices of layers with adapters to the compute dtype, in which products read
    them.

    Nothing is ever added to them, so they need no fp32 copy. Parameters that are computed in
    fp32 stay so: norms, biases, routers.
    """
    if decoder.shape.adapters is None or isinstance(decoder.shape, HFShape):
        return
    specs = {spec.name: spec for spec in decoder.shape.list_parameters()}
    for name, parameter in decoder.named_parameters():
        spec = specs[name]
        if spec.is_product_matrix and spec.packed_matrix is None:
            parameter.data = parameter.data.to(dtype)
