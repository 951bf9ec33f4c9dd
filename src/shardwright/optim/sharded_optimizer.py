"""Base class and protocols of optimizers that need more of a matrix than its local shard.

AdamW and SGD work element by element, so a shard suffices. Muon needs whole matrices, Adafactor
sums over whole rows and columns, 8-bit AdamW whole blocks of a row. Each uses the parameter's
descriptor, so that the update under any layout equals that of a single process
(docs/optimizers.md, docs/decisions/0041-optimizers.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.layout import Bounds, ParameterBox, ParameterLayout

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
                the same parameters of its stage.
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


@dataclass(frozen=True)
class Moment:
    """One tensor of an optimizer's state, with its parameter and its sharding.

    `shape` and `boxes` are None if it has the parameter's shape and sharding.
    """

    tensor: Tensor
    parameter: str
    shape: tuple[int, ...] | None = None
    boxes: tuple[ParameterBox, ...] | None = None


class ShardedOptimizer(torch.optim.Optimizer):
    """Optimizer that knows the names and the sharding of its parameters.

    `moments` returns the tensors of a parameter's state that checkpoints save. `initialise_state`
    creates the state, at the latest in the first step.
    """

    rule: str
    """Name of the update rule in checkpoints."""
    has_collectives = True
    """True if every step runs collectives for every parameter."""

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
        raise NotImplementedError

    def moments(self, parameter: Tensor) -> dict[str, Moment]:
        """Return the tensors of a parameter's state by name; names contain no dots."""
        raise NotImplementedError

    def iterate_parameters(
        self, rule: str | None = None
    ) -> Iterator[tuple[str, Tensor, Tensor, Tensor, dict[str, Any], dict[str, Any]]]:
        """Yield (name, parameter, local part, local gradient, state, group) to update."""
        for group in self.param_groups:
            if rule is not None and group["rule"] != rule:
                continue
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if parameter.grad is None:
                    if not self.has_collectives:
                        continue
                    # All ranks must enter the same collectives.
                    parameter.grad = torch.zeros_like(parameter)
                self.initialise_state(parameter, group)
                local = get_local_tensor(parameter.detach())
                gradient = get_local_tensor(parameter.grad)
                yield name, parameter, local, gradient, self.state[parameter], group


def get_local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def narrow_to_box(tensor: Tensor, bounds: Bounds) -> Tensor:
    """Return a view of a box of a tensor."""
    for dim, (start, length) in enumerate(bounds):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def count_elements(shape: Sequence[int]) -> int:
    """Return the number of elements of a tensor of this shape."""
    count = 1
    for size in shape:
        count *= size
    return count


def advance_step(state: dict[str, Any]) -> float:
    """Increment the step count of a parameter and return it (1 for the first step)."""
    state["step"] += 1
    return float(state["step"])
