"""Find the elements of a recorded parameter in transformers' class.

Trainers name and stack parameters differently: transformers' class of a sparse model has one tensor
for all experts of a layer, a Hugging Face folder has one for each, and our decoder keeps a folder's
names for its own stacks. The map between the class and its folder is transformers' own conversion,
applied to tensors whose values are the numbers of their elements.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.architecture import MODEL_FAMILIES, ModelShape, read_config
from shardwright.errors import ArchitectureError
from shardwright.model.hf.hf_module import rename_to_folder

logger = logging.getLogger("shardwright")


@dataclass(frozen=True)
class PlacePart:
    """Elements of a recorded tensor that are in one tensor of the class.

    Attributes:
        owner: Name of the class's tensor.
        source: Numbers of the elements there, flat; None for all of them, in order.
        target: Numbers of the elements in the recorded tensor, flat; None with `source`.
    """

    owner: str
    source: Tensor | None = None
    target: Tensor | None = None


@dataclass(frozen=True)
class ParameterPlace:
    """Place of a recorded tensor of shape `shape` in tensors of the class."""

    shape: tuple[int, ...]
    parts: tuple[PlacePart, ...]

    @property
    def owners(self) -> tuple[str, ...]:
        """Names of the class's tensors that have elements of this one."""
        return tuple(part.owner for part in self.parts)

    def gather(self, tensors: Mapping[str, Tensor | None]) -> Tensor | None:
        """Return the recorded tensor's elements; zeros where an owner is missing or None.

        None if all owners are.
        """
        found = [tensors.get(part.owner) for part in self.parts]
        present = next((tensor for tensor in found if tensor is not None), None)
        if present is None:
            return None
        if self.parts[0].source is None:
            return present.reshape(self.shape)
        values = present.new_zeros(math.prod(self.shape))
        for part, tensor in zip(self.parts, found, strict=True):
            if tensor is not None:
                values[part.target] = tensor.reshape(-1)[part.source]
        return values.view(self.shape)

    def scatter(self, values: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Write a recorded tensor's elements into the class's contiguous tensors."""
        for part in self.parts:
            if part.source is None:
                tensors[part.owner].copy_(values)
            else:
                tensors[part.owner].view(-1)[part.source] = values.reshape(-1)[part.target]


class ParameterPlaces:
    """Places of parameters in a module of transformers, by the names that trainers give them.

    A name is looked up among those of the class, then of a Hugging Face folder, then of our
    decoder.

    Attributes:
        owners: Name of the parameter that owns a tensor, by the names of all its uses.
        tensors: Parameters and persistent floating point buffers by name; tied ones once.
    """

    def __init__(self, module: nn.Module, config: Mapping[str, Any]) -> None:
        self._module = module
        self._config = config
        owners = {id(p): name for name, p in module.named_parameters()}
        self.owners = {
            name: owners[id(p)] for name, p in module.named_parameters(remove_duplicate=False)
        }
        self.tensors: dict[str, Tensor] = dict(module.named_parameters())
        buffers = list_persistent_buffers(module)
        self.tensors |= {name: b for name, b in buffers.items() if b.is_floating_point()}

    def find(self, name: str) -> ParameterPlace | None:
        """Return the place of a parameter; None if no naming has it."""
        owner = self.owners.get(name, name)
        if owner in self.tensors:
            return ParameterPlace(tuple(self.tensors[owner].shape), (PlacePart(owner),))
        numbers = self._folder_numbers.get(name)
        if numbers is None:
            numbers = self._build_decoder_numbers(name)
        return None if numbers is None else self._split_by_owner(numbers)

    @cached_property
    def _starts(self) -> list[int]:
        sizes = [tensor.numel() for tensor in self.tensors.values()]
        return list(accumulate(sizes, initial=0))

    @cached_property
    def _folder_numbers(self) -> dict[str, Tensor]:
        """Number of every element of a folder's tensors among all elements of the module."""
        numbered = {
            name: torch.arange(start, start + tensor.numel()).view(tensor.shape)
            for start, (name, tensor) in zip(self._starts, self.tensors.items(), strict=False)
        }
        return rename_to_folder(self._module, numbered)

    @cached_property
    def _decoder_shape(self) -> ModelShape | None:
        if self._config.get("model_type") not in MODEL_FAMILIES:
            return None
        try:
            return read_config(dict(self._config))
        except ArchitectureError as error:
            logger.info("our decoder does not support this model: %s", error)
            return None

    @cached_property
    def _decoder_specs(self) -> dict[str, Any]:
        shape = self._decoder_shape
        return {} if shape is None else {spec.name: spec for spec in shape.list_parameters()}

    def _build_decoder_numbers(self, name: str) -> Tensor | None:
        """Number the elements of a stack of our decoder; None if it has no such stack."""
        spec = self._decoder_specs.get(name)
        if spec is None:
            return None
        numbers = torch.empty(spec.shape, dtype=torch.int64)
        for piece in spec.file_slices:
            place = self._folder_numbers.get(piece.name)
            if place is None or tuple(place.shape) != piece.shape:
                return None
            box = tuple(slice(start, stop) for start, stop in piece.box)
            numbers[box] = place.view(numbers[box].shape)
        return numbers

    def _split_by_owner(self, numbers: Tensor) -> ParameterPlace:
        flat = numbers.reshape(-1)
        owner_numbers = torch.bucketize(flat, torch.tensor(self._starts[1:]), right=True)
        names = list(self.tensors)
        parts = []
        for number in owner_numbers.unique().tolist():
            target = (owner_numbers == number).nonzero().flatten()
            parts.append(PlacePart(names[number], flat[target] - self._starts[number], target))
        return ParameterPlace(tuple(numbers.shape), tuple(parts))

    @property
    def decoder_shape(self) -> ModelShape | None:
        """Shape of our decoder for this model; None if it does not implement it."""
        return self._decoder_shape


def list_persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """List the buffers that belong to the model's state, by name."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, part in module.named_modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set
    }
