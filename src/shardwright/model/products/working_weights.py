"""Working weights: copies of master weights in the compute precision, cast once per update.

Without them a product casts its fp32 weight at every use: in each micro-batch, and again when a
block is recomputed. A working weight is a buffer next to its parameter. The parameter stays what
the optimizer, DDP and checkpoints know, and takes the gradient, which is accumulated in its own
dtype as before. A cast made once has the bits of a cast made at each use.

A copy is cast again at the start of a forward pass if its parameter has changed, or before it by
an update that overlaps with the pass. torch counts in-place changes, but not those of fused
optimizers, so an update calls `mark_changed`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

PREFIX = "working_"
"""Prefix of a buffer's name; the rest is the name of its parameter."""


def read_weight(weight: Tensor, working: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a weight in `dtype`: its working copy, or a cast if there is none of this dtype."""
    if working is None or working.dtype != dtype:
        return weight.to(dtype)
    if not torch.is_grad_enabled() or not weight.requires_grad:
        return working
    copy: Tensor = _UseWorkingWeight.apply(weight, working)
    return copy


class _UseWorkingWeight(torch.autograd.Function):
    """The working weight, as a cast of the parameter: its gradient is cast to the parameter's
    dtype."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, working: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        ctx.set_materialize_grads(False)  # a deferred gradient is None, not zeros
        return working.view_as(working)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        gradient = gradients[0]
        return None if gradient is None else gradient.to(ctx.dtype), None


class _Slot(NamedTuple):
    module: nn.Module
    name: str
    """Name of a parameter of the module."""


class WorkingWeights:
    """The working weights of a model's modules."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Allocate copies in `dtype` of all parameters that declare one and have another dtype.

        A module declares one by a buffer that is None. The parameters must be on their device;
        packed ones have no copy.
        """
        slots = [
            _Slot(module, name.removeprefix(PREFIX))
            for module in model.modules()
            for name in module._buffers
            if name.startswith(PREFIX)
        ]
        self._masters: list[nn.Parameter] = []
        self.copies: list[Tensor] = []
        for module, name in slots:
            parameter = module.get_parameter(name)
            if parameter.is_floating_point() and parameter.dtype != dtype:
                copy = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                setattr(module, PREFIX + name, copy)
                self._masters.append(parameter)
                self.copies.append(copy)
        self._versions: list[int | None] = [None] * len(self._masters)

    def mark_changed(self) -> None:
        """State that all parameters may have changed."""
        self._versions = [None] * len(self._masters)

    @torch.no_grad()
    def update(self, parameters: Collection[Tensor] | None = None) -> None:
        """Cast those of the parameters (default: all) that have changed, in one call."""
        chosen = None if parameters is None else set(map(id, parameters))
        stale = [
            index
            for index, (master, version) in enumerate(
                zip(self._masters, self._versions, strict=True)
            )
            if master._version != version and (chosen is None or id(master) in chosen)
        ]
        if not stale:
            return
        torch._foreach_copy_(_select(self.copies, stale), _select(self._masters, stale))
        for index in stale:
            self._versions[index] = self._masters[index]._version


def _select(tensors: Sequence[Tensor], indices: Sequence[int]) -> list[Tensor]:
    return [tensors[index] for index in indices]


def declare_working_weight(module: nn.Module, *names: str) -> None:
    """Declare that a module reads these parameters with `read_weight`."""
    for name in names:
        module.register_buffer(PREFIX + name, None, persistent=False)
