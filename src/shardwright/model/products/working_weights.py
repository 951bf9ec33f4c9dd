"""Working weights: copies of master weights in the compute precision, cast once per update.

Without them a product casts its fp32 weight at every use: in each micro-batch, and again when a
block is recomputed. A working weight is a buffer next to its parameter. The parameter stays what
the optimizer, DDP and checkpoints know, and takes the gradient, which is accumulated in its own
dtype as before. A cast made once has the bits of a cast made at each use.

A copy is cast again at the start of a forward pass if its parameter has changed, or before it by
an update that overlaps with the pass. torch counts in-place changes, but not those of fused
optimizers, so an update calls `mark_changed`. An update that writes the copy too calls
`mark_current` afterwards.

A weight that multiplies quantised operands has its codes instead (`working_operands`), which are
written just before the forward pass of its block.

Of offloaded weights that ZeRO shards, a rank's working weights are copies of its shards, from which
FSDP2 gathers (`parallel.sharded_weights`). No module reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.model.products.scaled_product import OperandWriter, ScaledProducts
from shardwright.model.products.working_operands import (
    allocate_operands,
    fill_operands,
    list_tensors,
)

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


class _Copy:
    """Tensors that products read in place of one parameter, and whether they are current."""

    def __init__(self, master: Tensor) -> None:
        """`master` has the parameter's values."""
        self.master = master
        self._version: int | None = None

    @property
    def is_current(self) -> bool:
        """True if the parameter has not changed since the copy was written."""
        return self.master._version == self._version

    def mark_current(self) -> None:
        """State that the copy has the parameter's values."""
        self._version = self.master._version

    def mark_changed(self) -> None:
        """State that the parameter may have changed."""
        self._version = None


class WorkingWeight(_Copy):
    """The working weight of one parameter, or of this rank's shard of it."""

    def __init__(self, master: Tensor, tensor: Tensor) -> None:
        super().__init__(master)
        self.tensor = tensor

    @property
    def tensors(self) -> list[Tensor]:
        """The copy, as a list."""
        return [self.tensor]


class _QuantisedWeight(_Copy):
    """The operands of one weight that multiplies quantised operands."""

    def __init__(
        self, master: nn.Parameter, products: ScaledProducts, *, is_transposed: bool
    ) -> None:
        super().__init__(master)
        self.products = products
        self.is_transposed = is_transposed

    @property
    def matrix(self) -> Tensor:
        """The weight with outputs before inputs."""
        weight = self.master.detach()
        return weight.mT if self.is_transposed else weight

    @property
    def tensors(self) -> list[Tensor]:
        """Codes and scales."""
        working = self.products.working
        assert working is not None
        return [tensor for operand in working.list_sets() for tensor in list_tensors(operand)]


class WorkingWeights:
    """The working weights of a model's modules, or of its shards."""

    def __init__(
        self,
        copies: Mapping[Tensor, WorkingWeight | _QuantisedWeight],
        fill: OperandWriter = fill_operands,
    ) -> None:
        """
        Args:
            copies: by parameter.
            fill: writes codes.
        """
        self._fill = fill
        self._copies = dict(copies)
        self._copies_of_block: dict[nn.Module, list[WorkingWeight | _QuantisedWeight]] = {}
        self._offloaded: set[Tensor] = set()

    @property
    def copies(self) -> list[Tensor]:
        """Tensors of all working weights, and of codes and scales."""
        return [tensor for copy in self._copies.values() for tensor in copy.tensors]

    def find(self, parameter: Tensor) -> WorkingWeight | None:
        """Return the working weight of a parameter; None if it has none, or codes."""
        copy = self._copies.get(parameter)
        return copy if isinstance(copy, WorkingWeight) else None

    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        """Leave copies of these parameters to `update`: they are not always on the device."""
        self._offloaded.update(parameters)

    def are_current(self, parameters: Iterable[Tensor]) -> bool:
        """Return True if each of these parameters has a copy, or codes, with its values."""
        return all(each in self._copies and self._copies[each].is_current for each in parameters)

    def mark_changed(self, parameters: Iterable[Tensor] | None = None) -> None:
        """State that the parameters (default: all) may have changed."""
        for copy in self._select(parameters):
            copy.mark_changed()

    def mark_current(self) -> None:
        """State that all copies and codes have the values of their parameters."""
        for copy in self._select(None):
            copy.mark_current()

    @torch.no_grad()
    def update(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Cast or quantise those of the parameters (default: all) that have changed."""
        copies = self._select(parameters)
        _cast(copies)
        self._quantise(copies)

    @torch.no_grad()
    def cast(self) -> None:
        """Cast the parameters that have changed, in one call, without quantised ones."""
        _cast(self._select_resident(self._copies))

    @torch.no_grad()
    def quantise(self, block: nn.Module) -> None:
        """Quantise the weights of a block that have changed.

        A call launches several kernels for each weight. Before its block, and not with those of all
        blocks, the device computes other blocks meanwhile.
        """
        if block not in self._copies_of_block:
            self._copies_of_block[block] = self._select_resident(block.parameters())
        self._quantise(self._copies_of_block[block])

    def _quantise(self, copies: Iterable[WorkingWeight | _QuantisedWeight]) -> None:
        for copy in copies:
            if isinstance(copy, _QuantisedWeight) and not copy.is_current:
                copy.products.fill_working(copy.matrix, self._fill)
                copy.mark_current()

    def _select(
        self, parameters: Iterable[Tensor] | None
    ) -> list[WorkingWeight | _QuantisedWeight]:
        if parameters is None:
            return list(self._copies.values())
        return [self._copies[each] for each in parameters if each in self._copies]

    def _select_resident(
        self, parameters: Iterable[Tensor]
    ) -> list[WorkingWeight | _QuantisedWeight]:
        return self._select(each for each in parameters if each not in self._offloaded)


def copy_weights(
    model: nn.Module, dtype: torch.dtype, fill: OperandWriter | None = None
) -> WorkingWeights:
    """Allocate copies in `dtype` of all parameters that declare one and have another dtype.

    A module declares one by a buffer that is None. The parameters must be on their device; packed
    ones have no copy. A weight that multiplies quantised operands has its codes instead.

    Args:
        fill: compiled form of `fill_operands`, which writes codes; default: itself.
    """
    slots = [
        _Slot(module, name.removeprefix(PREFIX))
        for module in model.modules()
        for name in module._buffers
        if name.startswith(PREFIX)
    ]
    copies: dict[Tensor, WorkingWeight | _QuantisedWeight] = {}
    for module, name in slots:
        parameter = module.get_parameter(name)
        if not parameter.is_floating_point() or parameter.dtype == dtype:
            continue
        assert parameter not in copies, f"{name} has two working weights"
        products: ScaledProducts | None = getattr(module, "scaled", None)
        if products is None or name != "weight":
            copy = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            setattr(module, PREFIX + name, copy)
            copies[parameter] = WorkingWeight(parameter, copy)
            continue
        weight = _QuantisedWeight(parameter, products, is_transposed=bool(module.is_transposed))
        products.working = allocate_operands(
            weight.matrix, products.scaling, dtype, is_emulated=products.is_emulated
        )
        copies[parameter] = weight
        if fill is not None:
            for tensor in weight.tensors:
                # Sizes of scales are the recipe's. A second recipe in one process would make
                # them symbols, with which torch 2.11 fails to trace the products.
                torch._dynamo.mark_static(tensor)
    return WorkingWeights(copies, fill or fill_operands)


def _cast(copies: Iterable[WorkingWeight | _QuantisedWeight]) -> None:
    """Cast the parameters that have changed, in one call."""
    stale = [copy for copy in copies if isinstance(copy, WorkingWeight) and not copy.is_current]
    if not stale:
        return
    torch._foreach_copy_([copy.tensor for copy in stale], [copy.master for copy in stale])
    for copy in stale:
        copy.mark_current()


def declare_working_weight(module: nn.Module, *names: str) -> None:
    """Declare that a module reads these parameters with `read_weight`."""
    for name in names:
        module.register_buffer(PREFIX + name, None, persistent=False)
