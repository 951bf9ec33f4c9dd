"""Base class and protocols of optimizers that need more of a matrix than its local shard.

AdamW and SGD work element by element, so a shard suffices. Muon needs whole matrices, Adafactor
sums over whole rows and columns, 8-bit AdamW whole blocks of a row. Each uses the parameter's
descriptor, so that the update under any layout equals that of a single process
(docs/optimizers.md, docs/decisions/0041-optimizers.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shardwright.layout import Bounds, ParameterBox, ParameterLayout
from shardwright.numerics import get_local_tensor, scale_

MatrixFunction = Callable[[Tensor], Tensor]
"""Function of one matrix [rows, columns] that returns the same shape."""


class MatrixExchange(Protocol):
    """Gather of whole matrices, each on one of its ranks, and scatter of the results."""

    def apply(self, function: MatrixFunction, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Apply `function` to every whole matrix and return the local parts.

        Each matrix is computed once per set of ranks that shard it.

        Args:
            tensors: this rank's part of each matrix by parameter name (empty where it has
                none), all of one dtype. A stack counts as that many matrices. Every rank passes
                the same parameters of its stage, all or some.
        """
        ...


class ShardedModel(Protocol):
    """Sharding of a model's parameters over ranks; `parallel.ParallelModel` implements it."""

    layouts: dict[str, ParameterLayout]

    def local_boxes(self, name: str) -> tuple[ParameterBox, ...]:
        """Return the boxes of a parameter that this rank holds."""
        ...

    def sum_over(self, tensor: Tensor, axes: Sequence[str]) -> Tensor:
        """All-reduce `tensor` in place (sum) over mesh axes and return it."""
        ...

    def block_matrices(self) -> frozenset[str]:
        """Return the trainable matrices, and experts' stacks of them, in the model's blocks."""
        ...

    def build_matrix_exchange(self, names: Collection[str]) -> MatrixExchange:
        """Build the exchange of these parameters.

        Collective: every rank passes the same names of the whole model.
        """
        ...


class GradientListener(Protocol):
    """Receiver of a step's gradients."""

    def take_gradient(self, name: str) -> None:
        """Use the gradient of a parameter on the current stream. It is final."""
        ...

    def end_gradients(self) -> None:
        """End the step's gradients: all have been reported."""
        ...


@dataclass(frozen=True)
class Moment:
    """One tensor of an optimizer's state, with its parameter and its sharding.

    `shape` and `boxes` are None if it has the parameter's shape and sharding.
    """

    tensor: Tensor
    parameter: str
    shape: tuple[int, ...] | None = None
    boxes: tuple[ParameterBox, ...] | None = None
    is_offloaded: bool = False
    """True if the tensor is a view of a store; a save then writes from it without a copy."""


@dataclass(frozen=True)
class StateSpec:
    """Shape and dtype of one tensor of a parameter's state on this rank; it starts at zero."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return count_elements(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ParameterPiece:
    """Rows of a parameter's local part, with their gradient and state, that are updated together.

    All tensors have the shape of the local part if the piece is all of it. Of a split parameter
    they are consecutive rows, shape [rows, row length], or [rows] if the row length is 1
    (`PiecewiseOptimizer.get_row_length`).
    """

    name: str
    local: Tensor
    gradient: Tensor
    state: dict[str, Any]
    group: dict[str, Any]
    first_element: int | None = None
    """Place of the piece in the flattened local part; None if it is all of it."""
    copy: WeightCopy | None = None
    """Copy in the compute precision of the whole local part, which the update may write."""


class WeightCopy(Protocol):
    """Copy of a parameter in the compute precision (`model.products.working_weights`)."""

    tensor: Tensor

    def mark_current(self) -> None:
        """State that the copy has the parameter's values."""
        ...


class PiecewiseOptimizer(Protocol):
    """Optimizer that updates pieces of parameters, with a state that the caller passes.

    `ElementwiseUpdate` and `ShardedOptimizer` have the methods that most optimizers share.
    """

    param_groups: list[dict[str, Any]]
    is_divisible: bool
    has_collectives: bool

    def list_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, StateSpec]:
        """List the tensors of a parameter's state by name, without its step count."""
        ...

    def get_row_length(self, parameter: Tensor, group: dict[str, Any]) -> int:
        """Return the elements of a row: rows are updated independently of each other."""
        ...

    def describe_moments(self, parameter: Tensor, state: Mapping[str, Tensor]) -> dict[str, Moment]:
        """Return the given state tensors with their sharding, for checkpoints."""
        ...

    def create_step_count(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Create a parameter's step count of zero, on the device where updates expect it."""
        ...

    def is_updated_without_gradient(self, group: dict[str, Any]) -> bool:
        """Return True if parameters without a gradient are updated as with zeros."""
        ...

    def update_pieces(self, pieces: Sequence[ParameterPiece]) -> None:
        """Update parameters and state of these pieces and advance their step counts."""
        ...

    def finish_update(self) -> None:
        """Do the rest for the parameters whose pieces have been updated since the last call.

        Collective if the optimizer's step is.
        """
        ...


@dataclass(frozen=True)
class UpdatePart:
    """Parameters that are updated together, and what follows as soon as they are."""

    names: frozenset[str]
    end: Callable[[], None]


class UpdateUnit(NamedTuple):
    """Parameters that a forward pass reads together, and the modules that read them."""

    names: frozenset[str]
    modules: tuple[nn.Module, ...]


class DeviceFactor(NamedTuple):
    """Factor of the gradients that the host does not know, nor whether the step is skipped.

    fp32 tensors without dims on the device of the gradients.
    """

    value: Tensor
    """NaN if the step is skipped."""
    is_skipped: Tensor
    """1 or 0."""

    @classmethod
    def from_value(cls, value: Tensor) -> DeviceFactor:
        """Build a factor from its value, which is NaN if the step is skipped."""
        return cls(value, value.isnan().float())


class UpdateByPiece:
    """Step of an optimizer that has the methods of `PiecewiseOptimizer`."""

    has_collectives = False
    """True if every step runs collectives for every parameter."""
    is_divisible = True
    """True if pieces of the parameters can be updated one after another."""
    has_step_count = True
    """True if the state has the number of a parameter's updates, which the rule reads."""
    update_parts: Sequence[UpdatePart] = ()
    """Order of the update; parameters of no part come last."""
    applies_factor = False
    """True if the update multiplies gradients by `gradient_factor`; else its caller has done so."""
    gradient_factor = 1.0
    """Factor of the gradients in the next step."""
    device_factor: DeviceFactor | None = None
    """Replaces `gradient_factor` in the next step if `can_skip_on_device`."""
    find_copy: Callable[[Tensor], WeightCopy | None] | None = None
    """Finds the copy of a parameter that an update may write."""
    _prepared: Sequence[ParameterPiece] | None = None
    _counted: Sequence[Tensor] = ()
    """Step counts on the host that have been advanced for a step that the device may skip."""

    def prepare_step(self) -> None:
        """Do what the next step needs besides the gradients' values and factor.

        A GPU is still computing the gradients then; after the step's host wait it would be idle.
        Learning rate, `find_copy` and the gradients' tensors must not change until the step.
        """
        self._prepared = self.list_pieces()
        self.prepare_pieces(self._prepared)

    def prepare_pieces(self, pieces: Sequence[ParameterPiece]) -> None:
        """Prepare the next update of these pieces. The last one is not taken back any more."""
        self._counted = ()

    def can_skip_on_device(self) -> bool:
        """Return True if the prepared step may find on the device that it changes nothing."""
        return False

    def advance_counts(self, pieces: Sequence[ParameterPiece]) -> None:
        """Advance step counts that are on the host."""
        counts = [piece.state["step"] for piece in pieces]
        for count in counts:
            count += 1
        if self.device_factor is not None:
            self._counted = [*self._counted, *counts]

    def undo_counts(self) -> None:
        """Take back what a step has counted on the host that the device skipped."""
        for count in self._counted:
            count -= 1
        self._counted = ()

    def discard_preparation(self) -> None:
        """Forget what `prepare_step` has prepared, which holds the gradients: there is no step."""
        self._prepared = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter. Collective if `has_collectives`: every rank calls it."""
        assert closure is None, "gradients are accumulated before the step"
        optimizer: Any = self
        parts = () if self.has_collectives else self.update_parts
        listed = self.list_pieces() if self._prepared is None else self._prepared
        pieces = {piece.name: piece for piece in listed}
        for part in parts:
            names = [name for name in pieces if name in part.names]
            optimizer.update_pieces([pieces.pop(name) for name in names])
            part.end()
        optimizer.update_pieces(list(pieces.values()))
        optimizer.finish_update()
        for part in self.update_parts[len(parts) :]:
            part.end()
        self.gradient_factor = 1.0
        self.device_factor = None
        self.discard_preparation()

    def list_pieces(self) -> list[ParameterPiece]:
        """List the parameters to update, each as one piece, with the state of this optimizer."""
        optimizer: Any = self
        pieces = []
        for group in optimizer.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if parameter.grad is None:
                    if not optimizer.is_updated_without_gradient(group):
                        continue
                    parameter.grad = torch.zeros_like(parameter)
                optimizer.initialise_state(parameter, group)
                copy = None if self.find_copy is None else self.find_copy(parameter)
                pieces.append(
                    ParameterPiece(
                        name,
                        get_local_tensor(parameter.detach()),
                        get_local_tensor(parameter.grad),
                        optimizer.state[parameter],
                        group,
                        copy=copy,
                    )
                )
        return pieces


class ElementwiseUpdate(UpdateByPiece):
    """Methods of `PiecewiseOptimizer` for an optimizer that updates every element on its own."""

    def initialise_state(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Create the initial state of a parameter, sharded as it is; existing state is kept."""
        optimizer: Any = self
        state = optimizer.state[parameter]
        for key in optimizer.list_state(parameter, group):
            if state.get(key) is None:
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if self.has_step_count and "step" not in state:
            state["step"] = optimizer.create_step_count(parameter, group)

    def get_row_length(self, parameter: Tensor, group: dict[str, Any]) -> int:
        """Return 1: rows are single elements."""
        return 1

    def describe_moments(self, parameter: Tensor, state: Mapping[str, Tensor]) -> dict[str, Moment]:
        """Return the given state tensors, which are sharded like the parameter."""
        for group in self.param_groups:  # type: ignore[attr-defined]
            for name, member in zip(group["param_names"], group["params"], strict=True):
                if member is parameter:
                    return {key: Moment(tensor, name) for key, tensor in state.items()}
        raise KeyError("the optimizer does not have this parameter")

    def is_updated_without_gradient(self, group: dict[str, Any]) -> bool:
        """Return False: parameters without a gradient do not change."""
        return False

    def finish_update(self) -> None:
        """Nothing is left to do: every element is independent."""


class ShardedOptimizer(UpdateByPiece, torch.optim.Optimizer):
    """Optimizer that knows the names and the sharding of its parameters.

    A subclass defines `rule`, `list_state` and `update_pieces`. By default updates are element by
    element and moments have their parameter's shape and sharding; override the methods that state
    otherwise.
    `moments` returns the tensors of a parameter's state that checkpoints save. `initialise_state`
    creates the state, at the latest in the first step.
    """

    rule: str
    """Name of the update rule in checkpoints."""
    has_collectives = True

    def __init__(
        self, groups: list[dict[str, Any]], defaults: dict[str, Any], model: ShardedModel
    ) -> None:
        super().__init__(groups, defaults)
        self.model = model
        self.parameter_names = {
            parameter: name
            for group in self.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
        }

    def initialise_state(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Create the initial state of a parameter; existing state is kept."""
        state = self.state[parameter]
        if state:
            return
        state["step"] = self.create_step_count(parameter, group)
        for key, spec in self.list_state(parameter, group).items():
            state[key] = torch.zeros(spec.shape, dtype=spec.dtype, device=parameter.device)

    def list_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, StateSpec]:
        """List the tensors of a parameter's state by name, without its step count."""
        raise NotImplementedError

    def moments(self, parameter: Tensor) -> dict[str, Moment]:
        """Return the tensors of a parameter's state by name; names contain no dots."""
        state = self.state[parameter]
        return self.describe_moments(
            parameter, {key: tensor for key, tensor in state.items() if key != "step"}
        )

    def describe_moments(self, parameter: Tensor, state: Mapping[str, Tensor]) -> dict[str, Moment]:
        """Return the given state tensors with their sharding, for checkpoints."""
        name = self.parameter_names[parameter]
        return {key: Moment(tensor, name) for key, tensor in state.items()}

    def create_step_count(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Create a parameter's step count of zero, on the device where updates expect it."""
        return torch.zeros((), dtype=torch.float32)

    def update_pieces(self, pieces: Sequence[ParameterPiece]) -> None:
        """Update parameters and state of these pieces and advance their step counts."""
        raise NotImplementedError

    def get_row_length(self, parameter: Tensor, group: dict[str, Any]) -> int:
        """Return the elements of a row: rows are updated independently of each other."""
        return 1

    def finish_update(self) -> None:
        """Do the rest of the step, after all pieces: nothing, unless an optimizer overrides it."""

    def is_updated_without_gradient(self, group: dict[str, Any]) -> bool:
        """Return True if parameters without a gradient are updated as with zeros.

        All ranks must enter the same collectives.
        """
        return self.has_collectives


def scale_gradients(pieces: Sequence[ParameterPiece], factor: float | DeviceFactor) -> None:
    """Multiply the gradients of pieces in place; a factor of 1 changes nothing."""
    value = factor.value if isinstance(factor, DeviceFactor) else factor
    if isinstance(value, Tensor) or value != 1.0:
        scale_((piece.gradient for piece in pieces), value)


def narrow_to_box(tensor: Tensor, bounds: Bounds) -> Tensor:
    """Return a view of a box of a tensor."""
    for dim, (start, length) in enumerate(bounds):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def count_elements(shape: Sequence[int]) -> int:
    """Return the number of elements of a tensor of this shape."""
    return math.prod(shape)


def advance_step(state: dict[str, Any]) -> float:
    """Increment the step count of a parameter and return it (1 for the first step)."""
    state["step"] += 1
    return float(state["step"])
