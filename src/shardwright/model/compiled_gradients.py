"""Gradients of autograd functions in compiled code.

torch 2.11 compiles every tensor that an autograd function computes as one of its results. Where an
operation returns its input (an operation in place, `contiguous()`, `to` the dtype that the tensor
has), one tensor is then several results. The last of them gets its gradient, which the function's
backward pass does not read: it computes with zeros, without an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import RecipeError


@cache
def repair_compiled_gradients() -> None:
    """Let torch.compile keep the gradients of autograd functions, if this torch loses them.

    Raises:
        RecipeError: torch loses them, and the repair does not help.
    """
    if _keeps_gradient(torch.float32):
        return
    _leave_out_repeated_results()
    # Another dtype: torch would run the code that it has compiled above.
    if not _keeps_gradient(torch.float64):
        raise RecipeError(
            f"torch {torch.__version__} compiles autograd functions without their gradients",
            field="model.compile",
            got=True,
            allowed="false",
            remedy="or install torch 2.12 or newer",
        )


class _RepeatedResult(torch.autograd.Function):
    """Product whose tensor an operation returns again."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return (x * 1.0).contiguous()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _keeps_gradient(dtype: torch.dtype) -> bool:
    """Compile a function whose result is returned twice, and look at its gradient."""
    with torch.enable_grad(), warnings.catch_warnings(action="ignore"):  # torch's about itself
        x = torch.ones(1, dtype=dtype, device="cpu", requires_grad=True)
        compiled: Any = torch.compile(_multiply_repeatedly, backend="eager", fullgraph=True)
        (gradient,) = torch.autograd.grad(compiled(x), x)
    return bool(gradient)


def _multiply_repeatedly(x: Tensor) -> Any:
    return _RepeatedResult.apply(x * 1.0)


def _leave_out_repeated_results() -> None:
    """Leave tensors that a function returns already out of the results that torch adds."""
    source: Any = import_module("torch._dynamo.variables.higher_order_ops")
    collect = source.collect_intermediate_outputs

    def collect_others(tx: Any, tracer: Any, results: Sequence[Any], *options: Any) -> list[Any]:
        returned = [_get_traced_value(result) for result in results]
        return [
            added
            for added in collect(tx, tracer, results, *options)
            if not any(_get_traced_value(added) is value for value in returned)
        ]

    source.collect_intermediate_outputs = collect_others


def _get_traced_value(variable: Any) -> Any:
    return variable.as_proxy().node.meta.get("example_value", variable)
