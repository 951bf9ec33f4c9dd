"""Results of communication that recomputation keeps, so that ranks do not communicate again.

Outside compiled code the policy of a selective checkpoint does not see them as results: collectives
write into buffers, and an exchange returns numbers on the host. So the functions that communicate
call `keep_result`. A recomputation repeats the calls in the same order, and takes the results from
the queue of its block. In compiled code the policy keeps the results of functional collectives.

The product whose partial sums are reduced over ranks is not repeated either if the reduced result
is kept: nothing else reads its result.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.model.result_names import (
    STATISTICS,
    UNREAD_END,
    NamedPart,
    get_result_name,
    name_results,
)

Result = TypeVar("Result")


class StoredResult(Protocol):
    """Reference to a tensor that is stored elsewhere."""

    def unpack(self) -> Tensor:
        """Return the tensor."""
        ...


PackResult = Callable[[Tensor], StoredResult]


class _SavedResults:
    """Results of one call of a block, in the order of their calls."""

    def __init__(self, names: frozenset[NamedPart], pack: PackResult) -> None:
        self._names = names
        self._pack = pack
        self._results: deque[Any] = deque()

    @property
    def is_end_unread(self) -> bool:
        return UNREAD_END in self._names

    def is_saved(self) -> bool:
        return get_result_name() in self._names

    def store(self, result: Any) -> None:
        self._results.append(self._pack(result) if isinstance(result, Tensor) else result)

    def take(self) -> Any:
        result = self._results.popleft()
        return result.unpack() if hasattr(result, "unpack") else result


class _Thread(threading.local):
    saved: _SavedResults | None = None
    is_restoring = False


_thread = _Thread()
"""The block that this thread computes. A backward pass recomputes in a thread of autograd."""


class _UseSavedResults(AbstractContextManager[None]):
    """Let `keep_result` use the results of a block while the context is open."""

    def __init__(self, saved: _SavedResults, *, is_restoring: bool) -> None:
        self._saved = saved
        self._is_restoring = is_restoring

    def __enter__(self) -> None:
        self._outer = _thread.saved, _thread.is_restoring
        _thread.saved = self._saved
        _thread.is_restoring = self._is_restoring

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _thread.saved, _thread.is_restoring = self._outer


def create_keeping_contexts(
    names: frozenset[NamedPart], pack: PackResult
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Create the contexts of a block's forward pass and of its recomputation.

    Args:
        names: names of the results to keep.
        pack: function through which kept tensors are stored.
    """
    saved = _SavedResults(names, pack)
    return _UseSavedResults(saved, is_restoring=False), _UseSavedResults(saved, is_restoring=True)


def keep_result(compute: Callable[[], Result]) -> Result:
    """Communicate by `compute`, or return the kept result of the forward pass.

    The result is a tensor, or a value without gradient. Its name is that of `name_results`.
    """
    if torch.compiler.is_compiling():
        return compute()
    saved = _thread.saved
    if saved is None or not saved.is_saved():
        return compute()
    if _thread.is_restoring:
        return cast(Result, saved.take())
    result = compute()
    saved.store(result)
    return result


def is_result_restored() -> bool:
    """Return True if `keep_result` would reuse a result of this name from the forward pass."""
    saved = _thread.saved
    return saved is not None and _thread.is_restoring and saved.is_saved()


def is_result_unread() -> bool:
    """Return True if recomputation reaches the block's output, which nothing reads again."""
    saved = _thread.saved
    is_end = get_result_name() == "down" and not torch.compiler.is_compiling()
    return is_end and saved is not None and _thread.is_restoring and saved.is_end_unread


def keep_statistic(compute: Callable[[], Result]) -> Result:
    """Communicate a few bytes by `compute`, which every kind of recomputation keeps."""
    with name_results(STATISTICS):
        return keep_result(compute)


_FIRST_OPERANDS = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::addmm": 1,
    "aten::_scaled_mm": 0,
    "aten::_scaled_mm_v2": 0,
}
"""Products that are not repeated if their reduced result is kept, with the index of the first of
their two operands."""

PARTIAL_PRODUCTS = frozenset(_FIRST_OPERANDS)


class _SkippedProducts(TorchDispatchMode):
    """Replace the results of partial products with tensors without values, which nothing reads."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = _FIRST_OPERANDS.get(func.name())
        if first is None or get_result_name() != "partial_product":
            return func(*args, **kwargs)
        left, right = args[first : first + 2]
        dtypes = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
        empty = left.new_empty((), dtype=dtypes[0] if dtypes else left.dtype)
        return empty.expand(*left.shape[:-1], right.shape[-1])


def name_partial_product() -> AbstractContextManager[Any]:
    """Name the product whose partial results are then reduced over ranks.

    Call it inside the name of the reduced result. No policy keeps the partial results. If the
    reduced result is taken from the forward pass, the product is not computed.
    """
    if torch.compiler.is_compiling():
        return name_results("partial_product")
    is_skipped = is_result_restored()
    contexts = ExitStack()
    contexts.enter_context(name_results("partial_product"))
    if is_skipped:
        contexts.enter_context(_SkippedProducts())
    return contexts
