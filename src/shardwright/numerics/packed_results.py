"""Selective recomputation outside compiled code, with saved results stored through a function.

torch's `create_selective_checkpoint_contexts` hides the results of saved operations from autograd's
hooks for saved tensors, and torch 2.14 warns that a later release will show them. Here the function
decides: offloading sees them, other hooks do not. And torch's contexts number the operations,
whereas here a recomputation may omit some that are not saved.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class PackedResult(Protocol):
    """Reference to a stored tensor."""

    def unpack(self) -> Tensor:
        """Return the tensor."""
        ...


class DetachedResult:
    """A tensor without the graph that computed it, which would keep the stored results alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version

    def unpack(self) -> Tensor:
        """Return the tensor."""
        assert self._tensor._version == self._version, "a kept result was modified"
        return self._tensor.detach()


PackFunction = Callable[[Tensor], PackedResult]
_Results = defaultdict[Any, deque[Any]]
"""Packed results of each operation, in the order of its calls."""


class _SavingMode(TorchDispatchMode):
    """Store the results of saved operations."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let a function compiled by itself run as one operation."""
        return True

    def __init__(
        self, results: _Results, is_saved: Callable[[Any], bool], pack: PackFunction
    ) -> None:
        super().__init__()
        self._results = results
        self._is_saved = is_saved
        self._pack = pack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._is_saved(func):
            self._results[func].append(
                tree_map(lambda x: self._pack(x) if isinstance(x, Tensor) else x, output)
            )
        return output


class _RestoringMode(TorchDispatchMode):
    """Return stored results in place of saved operations."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let a function compiled by itself run as one operation."""
        return True

    def __init__(self, results: _Results, is_saved: Callable[[Any], bool]) -> None:
        super().__init__()
        self._results = results
        self._is_saved = is_saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_saved(func):
            return func(*args, **(kwargs or {}))
        return tree_map(
            lambda x: x.unpack() if hasattr(x, "unpack") else x, self._results[func].popleft()
        )


def create_packing_contexts(
    is_saved: Callable[[Any], bool], pack: PackFunction
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Create the contexts of a checkpoint's forward pass and of its recomputation."""
    results: _Results = defaultdict(deque)
    return _SavingMode(results, is_saved, pack), _RestoringMode(results, is_saved)
