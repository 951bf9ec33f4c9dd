"""Communication in progress between two operators of compiled code."""

from __future__ import annotations

import itertools
from typing import Generic, TypeVar

import torch
from torch import Tensor

_Pending = TypeVar("_Pending")

_numbers = itertools.count(1)


class PendingCommunication(Generic[_Pending]):
    """Communication that one operator begins and another one ends.

    The first returns a ticket, a number in host memory that compiled code can pass on. What is
    sent and received stays here until the second one takes it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._by_number: dict[int, _Pending] = {}

    def add(self, pending: _Pending) -> Tensor:
        """Keep what is pending and return its ticket."""
        number = next(_numbers)
        self._by_number[number] = pending
        return torch.tensor(number, dtype=self._dtype)

    def allocate_ticket(self) -> Tensor:
        """Return a ticket without a value, for compilers."""
        return torch.empty((), dtype=self._dtype, device="cpu")

    def pop(self, ticket: Tensor, *default: _Pending) -> _Pending:
        """Remove and return what the ticket stands for, or the default if it was taken before.

        Raises:
            KeyError: It was taken before, and there is no default.
        """
        return self._by_number.pop(int(ticket), *default)
