"""Operator by which compiled products count the rounding of an operand (`RoundingTotals`).

One graph serves steps that count and steps that do not: the operator asks. It is called for each
operand of every step, so a call that does not count has to be cheap for the host: the operator is
defined without the layers of `torch.library.custom_op`, of which it needs none.

Legend: R x C any matrix.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from shardwright.model.products.operand import (
    Operand,
    add_inverses,
    has_inverse_scales,
    list_scales,
    rebuild_operand,
    replace_first_scales,
)


class OperandCounter(Protocol):
    """Counts operands of one weight."""

    @property
    def is_counting(self) -> bool:
        """True if the step counts."""

    def count(self, values_RC: Tensor, operand: Operand) -> None:
        """Count an operand."""


_numbers = itertools.count()
_counters: WeakValueDictionary[int, OperandCounter] = WeakValueDictionary()
"""Counters of this process by key. An operator of compiled code takes no object."""


def register_counter(counter: OperandCounter) -> Tensor:
    """Return the key of a counter for `count_in_operator`, an int64 scalar in host memory."""
    number = next(_numbers)
    _counters[number] = counter
    return torch.tensor(number, device="cpu")


def count_in_operator(
    key: Tensor, values_RC: Tensor, operand: Operand, *, is_emulated: bool
) -> Operand:
    """Count an operand in compiled code; the product reads the returned one.

    Args:
        is_emulated: True for products that read multipliers, not their inverses.
    """
    scaling = operand.scaling
    inverts = not is_emulated and has_inverse_scales(operand)
    scales = torch.ops.shardwright.count_operand(
        values_RC, operand.codes, list_scales(operand), scaling.rows, scaling.columns, inverts, key
    )
    return add_inverses(operand, scales) if inverts else replace_first_scales(operand, scales)


_library = torch.library.Library("shardwright", "FRAGMENT")
_library.define(
    "count_operand(Tensor values, Tensor codes, Tensor[] scales, int? rows, int? columns,"
    " bool inverts, Tensor key) -> Tensor"
)


def _count_operand(
    values: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    rows: int | None,
    columns: int | None,
    inverts: bool,
    key: Tensor,
) -> Tensor:
    """Count an operand if its step counts; return a copy of its first scales, or their inverses.

    The product reads the result, so the compiler does not remove the operator as unused. Kernels
    read inverses, which take no launch of their own then.
    """
    counter = _counters[int(key)]
    if counter.is_counting:
        counter.count(values, rebuild_operand(codes, scales, rows, columns))
    if inverts:
        return (1.0 / scales[0]).contiguous()
    return scales[0].clone(memory_format=torch.contiguous_format)


_library.impl("count_operand", _count_operand, "CompositeExplicitAutograd")


@torch.library.register_fake("shardwright::count_operand", lib=_library)
def _fake_count_operand(
    values: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    rows: int | None,
    columns: int | None,
    inverts: bool,
    key: Tensor,
) -> Tensor:
    return torch.empty_like(scales[0], memory_format=torch.contiguous_format)
