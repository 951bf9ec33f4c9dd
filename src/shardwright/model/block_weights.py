"""Matrices of blocks as parts of their modules, for a store that keeps them elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwright.architecture import HFShape, ModelShape, ParameterSpec
from shardwright.layout import Bounds, ParameterBox
from shardwright.model.decoder import Decoder

SliceReader = Callable[[str, Bounds], Tensor]
"""(parameter name, (start, length) per dimension) -> that slice of the parameter."""


def list_frozen_matrices(shape: ModelShape) -> dict[str, ParameterSpec]:
    """List the frozen matrices of all blocks by name; none without adapters."""
    return {} if shape.adapters is None else list_block_matrices(shape)


def list_block_matrices(shape: ModelShape) -> dict[str, ParameterSpec]:
    """List the matrices of blocks that can be offloaded, by name.

    With adapters the frozen ones, otherwise all. None of a model of transformers' own classes.
    """
    if isinstance(shape, HFShape):
        return {}
    return {
        spec.name: spec
        for spec in shape.list_parameters()
        if spec.layer is not None and spec.is_product_matrix
    }


@dataclass(frozen=True, eq=False)
class BlockWeight:
    """Matrix of a block, as this rank computes with it, and its place in the model."""

    spec: ParameterSpec
    module: nn.Module
    attribute: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def parameter(self) -> nn.Parameter:
        """The module's parameter."""
        found = getattr(self.module, self.attribute)
        assert isinstance(found, nn.Parameter)
        return found

    def install(self, values: Tensor) -> nn.Parameter:
        """Make a tensor the module's parameter and return it."""
        parameter = nn.Parameter(values, requires_grad=self.is_trained)
        setattr(self.module, self.attribute, parameter)
        return parameter


@dataclass(frozen=True)
class ShardGroup:
    """Ranks that each store an equal part of the same bytes."""

    num_ranks: int
    rank: int
    gather: Callable[[Tensor, Tensor], None]
    """(memory of all parts, this rank's part in it): collective that fills the memory."""


@dataclass(frozen=True)
class BlockWeightSources:
    """Values of weights of blocks, and the ranks that share their storage."""

    read_slice: SliceReader
    boxes: Mapping[str, Sequence[ParameterBox]]
    """Boxes of the tensor that this rank computes with, by name."""
    groups: Mapping[str, ShardGroup]
    """Ranks that divide a weight's bytes (ZeRO), by name; a weight that is left out is whole."""


def detach_weights(decoder: Decoder, specs: Mapping[str, ParameterSpec]) -> list[BlockWeight]:
    """Remove weights from a decoder on the meta device; `BlockWeight.install` returns them.

    In their place are parameters without elements, which have the same names.
    """
    found = []
    names = {parameter: name for name, parameter in decoder.named_parameters()}
    for module in decoder.modules():
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            spec = specs.get(names.get(parameter, ""))
            if spec is not None:
                weight = BlockWeight(
                    spec,
                    module,
                    attribute,
                    tuple(parameter.shape),
                    parameter.dtype,
                    parameter.requires_grad,
                )
                weight.install(parameter.new_empty(0))
                found.append(weight)
    return found


def read_rows(
    weight: BlockWeight,
    sources: BlockWeightSources,
    rows: tuple[int, int],
) -> Tensor:
    """Read rows `[start, stop)` of dim 0 of the tensor that this rank computes with."""
    start, stop = rows
    values = torch.empty((stop - start, *weight.shape[1:]), dtype=weight.dtype)
    for box in sources.boxes[weight.spec.name]:
        (first, length), *others = box.local_bounds
        low = max(first, start)
        high = min(first + length, stop)
        if low >= high:
            continue
        target = values[low - start : high - start]
        for dim, (offset, size) in enumerate(others, 1):
            target = target.narrow(dim, offset, size)
        global_first = box.global_bounds[0][0] + low - first
        bounds = ((global_first, high - low), *box.global_bounds[1:])
        target.copy_(sources.read_slice(weight.spec.name, bounds))
    return values
