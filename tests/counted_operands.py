"""Quantised operands, recorded where they are counted: in compiled code by an operator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from shardwright.model.products.operand import Operand, list_scales
from shardwright.model.products.scaled_product import RoundingTotals

CountedOperands = dict[str, set[tuple[bytes, bytes]]]
"""Codes and scales of the products of each weight."""


@contextmanager
def record_counted_operands(*, counts_repeats: bool = True) -> Iterator[CountedOperands]:
    """Record the operands of steps that count them, compiled or not.

    `counts_repeats` is False to count once what several products of a weight quantise.
    """
    recorded: CountedOperands = {}
    add = RoundingTotals.add

    def record(self: RoundingTotals, name: str, values_RC: Tensor, matrix: Operand) -> None:
        codes = matrix.codes.contiguous().view(torch.uint8).numpy().tobytes()
        scales = [each.contiguous().view(torch.uint8) for each in list_scales(matrix)]
        scale_bytes = b"".join(each.numpy().tobytes() for each in scales)
        operands = recorded.setdefault(name, set())
        if counts_repeats or (codes, scale_bytes) not in operands:
            add(self, name, values_RC, matrix)
        operands.add((codes, scale_bytes))

    with mock.patch.object(RoundingTotals, "add", record):
        yield recorded
