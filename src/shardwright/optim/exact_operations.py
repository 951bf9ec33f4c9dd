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


def divide_blocks(values_NS: Tensor, divisors_N: Tensor) -> Tensor:
    """Divide each fp32 row by a number of at least 2^-60, in compiled code with one division a row.

    Quotients of at least 2^-30 are the nearest numbers; smaller ones are close to them.

    Source: Markstein 1990, Computation of Elementary Functions on the IBM RISC System/6000.
    """
    # The reciprocal of a large number would be too small for all its bits.
    factor_N = torch.where(divisors_N < 2.0**100, 1.0, 2.0**-64)
    divisors_N = divisors_N * factor_N
    reciprocal_NS = (1 / divisors_N)[:, None].expand_as(values_NS)
    divisors_N = torch.where(divisors_N == torch.inf, 0.0, divisors_N)  # quotients are 0, not NaN
    values_NS = values_NS * factor_N[:, None]
    quotient_NS = values_NS * reciprocal_NS
    divisors_NS = divisors_N[:, None].expand_as(values_NS)
    remainder_NS = multiply_add(-quotient_NS, divisors_NS, values_NS)
    return multiply_add(remainder_NS, reciprocal_NS, quotient_NS)


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
