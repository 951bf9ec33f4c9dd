"""Names of the results that a block computes, for the policy of its recomputation.

Eagerly, a name is a value of the thread: a backward pass recomputes in a thread of autograd. In
compiled code, where the policy runs on the traced graph, it is an annotation of the graph's nodes.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal

import torch
from torch.fx import traceback

from shardwright.layout.saved_results import ResultName

STATISTICS: Literal["statistics"] = "statistics"
"""Name of small results of communication that every kind of recomputation keeps."""

UNREAD_END: Literal["unread_end"] = "unread_end"
"""In the names that a recomputation keeps: nothing reads the sum at the block's end (`down`)."""

NamedPart = ResultName | Literal["statistics", "partial_product", "unread_end"] | None
"""`partial_product`: result of a product that is then summed over tensor-parallel ranks."""

_KEY = "shardwright_result"


class _Thread(threading.local):
    name: NamedPart = None


_thread = _Thread()


class _NamedResults(AbstractContextManager[None]):
    """Set the thread's name, and restore the name around it at the end."""

    def __init__(self, name: NamedPart) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._outer = _thread.name
        _thread.name = self._name

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _thread.name = self._outer


def name_results(name: NamedPart) -> AbstractContextManager[Any]:
    """Name the results of the operations inside the context; None for no name."""
    if torch.compiler.is_compiling():
        return traceback.annotate({_KEY: name})
    return _NamedResults(name)


def get_result_name() -> NamedPart:
    """Return the name of the results that are computed now."""
    if _thread.name is not None:
        return _thread.name
    name: NamedPart = traceback.get_current_meta().get("custom", {}).get(_KEY)
    return name
