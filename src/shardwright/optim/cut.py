"""Optimizers whose update of a matrix needs more than the elements that a rank holds: what they ask, and what they share.

AdamW and SGD work element by element, so a shard is all they need. Muon needs whole matrices, Adafactor sums over whole rows and
columns, 8-bit AdamW whole blocks of a row. Each gets it by the parameter's descriptor, so that its update under any layout is the
one of a single process (docs/optimizers.md, docs/decisions/0041-optimizers.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.layout import Bounds, Held, ParameterLayout

MatrixFunction = Callable[[Tensor], Tensor]
"""[rows, columns] -> the same shape."""


class MatrixExchange(Protocol):
    """Whole matrices out of what ranks hold, each on one of them, and each rank's part of what became of them."""

    def apply(self, function: MatrixFunction, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`function` of every whole matrix, each computed once per set of ranks that hold it together.

        Args:
            tensors: by parameter name, this rank's part of each (with no elements where it has none), all of one dtype. A stack of
                matrices is as many matrices. Every rank names the same parameters of its stage.
        """
        ...


class ModelCut(Protocol):
    """How the parameters of a model lie over ranks, as `parallel.ParallelModel` says it."""

    layouts: dict[str, ParameterLayout]

    def held(self, name: str) -> tuple[Held, ...]:
        """The boxes of a parameter that this rank holds."""
        ...

    def sum_over(self, tensor: Tensor, axes: Sequence[str]) -> Tensor:
        """`tensor` summed in place over the ranks of mesh axes."""
        ...

    def block_matrices(self) -> frozenset[str]:
        """Trained parameters of the whole model's blocks that are matrices, or experts' stacks of them."""
        ...

    def exchange(self, names: Collection[str]) -> MatrixExchange:
        """The exchange of these parameters; every rank calls this with the same names of the whole model."""
        ...


@dataclass(frozen=True)
class Moment:
    """One tensor of an optimizer's state: of which parameter, and how it lies over ranks.

    `shape` and `boxes` are None where it has the parameter's shape and is cut like it.
    """

    tensor: Tensor
    parameter: str
    shape: tuple[int, ...] | None = None
    boxes: tuple[Held, ...] | None = None


class CutOptimizer(torch.optim.Optimizer):
    """An optimizer that knows its parameters by name and how they are cut.

    `moments` says what of a parameter's state is saved. States are made by `start`, before the first step or by it.
    """

    rule: str
    """As a checkpoint calls it."""
    exchanges = True
    """Whether ranks tell each other something of every parameter in every step."""

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any], cut: ModelCut) -> None:
        super().__init__(groups, defaults)
        self.cut = cut
        self.name_of = {
            parameter: name
            for group in self.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
        }

    def start(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Give a parameter the state that its first step starts from; what exists stays."""
        raise NotImplementedError

    def moments(self, parameter: Tensor) -> dict[str, Moment]:
        """The tensors of a parameter's state, by a name without dots."""
        raise NotImplementedError

    def walk(self, rule: str | None = None) -> Iterator[tuple[str, Tensor, Tensor, Tensor, dict[str, Any], dict[str, Any]]]:
        """(name, parameter, its local part, its local gradient, state, group) of what takes a step."""
        for group in self.param_groups:
            if rule is not None and group["rule"] != rule:
                continue
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if parameter.grad is None:
                    if not self.exchanges:
                        continue
                    parameter.grad = torch.zeros_like(parameter)  # a rank without one must enter what the others do
                self.start(parameter, group)
                local, gradient = local_part(parameter.detach()), local_part(parameter.grad)
                yield name, parameter, local, gradient, self.state[parameter], group


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; no copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def narrow(tensor: Tensor, bounds: Bounds) -> Tensor:
    """A view of a box of a tensor."""
    for dim, (start, length) in enumerate(bounds):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def num_elements(shape: Sequence[int]) -> int:
    """Elements of a tensor of this shape."""
    count = 1
    for size in shape:
        count *= size
    return count


def count_step(state: dict[str, Any]) -> float:
    """One more step of a parameter; its number, counted from 1."""
    state["step"] += 1
    return float(state["step"])
