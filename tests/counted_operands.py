"""Operands of 8-bit products, recorded where they are counted: in compiled code by an operator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from shardwright.model.products.fp8 import QuantisedMatrix
from shardwright.model.products.scaled_product import RoundingTotals

CountedOperands = dict[str, set[tuple[bytes, bytes]]]
"""Codes and multipliers of the products of each weight."""


@contextmanager
def record_counted_operands() -> Iterator[CountedOperands]:
    """Record the operands of steps that count them, compiled or not."""
    recorded: CountedOperands = {}
    add = RoundingTotals.add

    def record(self: RoundingTotals, name: str, values_RC: Tensor, matrix: QuantisedMatrix) -> None:
        codes = matrix.codes.contiguous().view(torch.uint8).numpy().tobytes()
        multipliers = matrix.multipliers.contiguous().numpy().tobytes()
        recorded.setdefault(name, set()).add((codes, multipliers))
        add(self, name, values_RC, matrix)

    with mock.patch.object(RoundingTotals, "add", record):
        yield recorded
