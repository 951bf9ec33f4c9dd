"""Operations for compiled updates that round as PyTorch's own kernels do.

A kernel of PyTorch may round a formula once where the compiler's code rounds twice, or take a
library's result that is not the nearest number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

CompileFunction = Callable[
    [str, Callable[..., Any], Callable[..., Any], Callable[[torch.device], Sequence[Any]]],
    Callable[..., Any],
]
"""Chooser between a function and its compiled form (`numerics.function_compiler`).

Arguments: name, the function to compile, the one to use otherwise, and a builder of sample
arguments.
"""


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Compute a x b + c with one rounding, in compiled code (two in uncompiled code)."""
    from torch._inductor.inductor_prims import fma  # imports the compiler

    result: Tensor = fma(a, b, c)
    return result


def interpolate(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """Compute `start.lerp(end, weight)` with the single rounding of PyTorch's kernels."""
    difference = end - start
    factor = torch.full_like(difference, weight)
    if abs(weight) < 0.5:
        return multiply_add(difference, factor, start)
    return multiply_add(difference, factor - 1, end)


def take_root(values: Tensor) -> Tensor:
    """Compute `values.sqrt()`.

    Builds of PyTorch with MKL take its square root on a CPU, which is not always the nearest
    number. Compiled code calls it as it is.
    """
    if values.device.type != "cpu":
        return values.sqrt()
    root: Tensor = _take_root_on_cpu(values)
    return root


@torch.library.custom_op("shardwright::root_on_cpu", mutates_args=())
def _take_root_on_cpu(values: torch.Tensor) -> torch.Tensor:
    return values.sqrt()


@_take_root_on_cpu.register_fake
def _fake_root(values: Tensor) -> Tensor:
    return torch.empty_like(values)
