"""Choice of the checks of a cell that run under a known bug."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from shardwright.verification import cell
from shardwright.verification.cell import MutationContext
from shardwright.verification.comparison import ComparisonResult

_EXCEPTIONAL = frozenset({"all ranks skip", "weights unchanged"})
_SGD = _EXCEPTIONAL | {"gradient", "loss", "norm", "routers", "weights after SGD"}
_ADAMW = frozenset({"norm under clipping", "learning rates", "weights after AdamW"})
_QUANTITIES = {
    "_verify_sgd": _SGD,
    "_verify_exceptional_steps": _EXCEPTIONAL,
    "_verify_adamw": _ADAMW,
}
"""Functions of a cell's checks, and the quantities that each compares."""


@contextmanager
def apply_with_checks_of(quantity: str, bug: MutationContext) -> Iterator[None]:
    """Apply a bug, and run only the checks that compare `quantity`: others would add steps."""
    with ExitStack() as stack:
        for name, quantities in _QUANTITIES.items():
            if quantity not in quantities:
                stack.enter_context(patch.object(cell, name, _find_nothing))
        stack.enter_context(bug())
        yield


def _find_nothing(*_arguments: object) -> list[ComparisonResult]:
    return []
