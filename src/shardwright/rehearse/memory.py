"""Live tensor bytes of a rank: their peak, and the operators that created them.

Works on fake tensors too. Every storage counts once, however many views it has, until Python
frees it. Resizing counts as well: FSDP2 frees and allocates memory by resizing storages.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_PACKAGE = "shardwright"


@dataclass(frozen=True)
class Origin:
    """Operator that created a storage, and the innermost line of shardwright that called it."""

    kind: str
    operator: str
    line: str


@dataclass(frozen=True)
class Contribution:
    """Bytes and tensors of one origin that were live at the peak."""

    origin: Origin
    num_bytes: int
    num_tensors: int


class LiveBytes(TorchDispatchMode):
    """Mode that counts the bytes of all storages created under it or registered with `tell`.

    Attributes:
        live_bytes: live bytes now.
        peak_bytes: maximum of `live_bytes` since the last `begin`.
        phase: `Origin.kind` of new storages.

    >>> with LiveBytes() as live:
    ...     x = torch.ones(256)
    ...     y = x + 1
    ...     del x
    >>> live.live_bytes, live.peak_bytes
    (1024, 2048)
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "other"
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._events: list[tuple[int, int]] = []
        self._origins: dict[int, Origin] = {}
        self._keys: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._next = 0
        self._peak_at = 0

    def __enter__(self) -> LiveBytes:
        self._resizes = self.counting_resizes()
        self._resizes.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self._resizes.__exit__(*details)

    @contextmanager
    def counting_resizes(self) -> Iterator[None]:
        """Count storages that are freed and allocated again by resizing."""
        with patch.object(
            torch.UntypedStorage, "resize_", _resizing(self, torch.UntypedStorage.resize_)
        ):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(func, result)
        return result

    def note(self, func: Any, result: Any) -> None:
        """Count an operator's new storages; for modes that call operators themselves."""
        for value in (result,) if isinstance(result, Tensor) else tree_iter(result):
            if isinstance(value, Tensor):
                self._see(value, func)

    def tell(self, tensors: Iterable[Tensor], kind: str) -> int:
        """Give tensors an origin, count those that are not counted yet, return their bytes."""
        total = 0
        with phase(self, kind):
            for tensor in tensors:
                key = self._see(tensor, None)
                self._origins[key] = Origin(kind, "", "")
                total += self._sizes[key]
        return total

    def begin(self) -> None:
        """Restart the measurement of the peak."""
        self.peak_bytes = self.live_bytes
        self._peak_at = len(self._events)

    def contributions(self) -> list[Contribution]:
        """Sum the bytes that were live at the peak by origin, largest first."""
        live: dict[int, int] = {}
        for key, size in self._events[: self._peak_at]:
            if size:
                live[key] = size
            else:
                live.pop(key, None)
        totals: dict[Origin, tuple[int, int]] = {}
        for key, size in live.items():
            bytes_so_far, count = totals.get(self._origins[key], (0, 0))
            totals[self._origins[key]] = (bytes_so_far + size, count + 1)
        contributions = [
            Contribution(origin, size, count) for origin, (size, count) in totals.items()
        ]
        return sorted(contributions, key=lambda contribution: -contribution.num_bytes)

    def _see(self, tensor: Tensor, func: Any) -> int:
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        storage = tensor.untyped_storage()
        known = self._keys.get(storage)
        if known is not None:
            return known
        key = self._next
        self._next += 1
        self._keys[storage] = key
        if func is None:
            self._origins[key] = Origin(self.phase, "", "")
        else:
            operator = func.name().partition("::")[2].partition(".")[0]
            self._origins[key] = Origin(self.phase, operator, _our_line(sys._getframe(3)))
        weakref.finalize(storage, self._resize, key, 0).atexit = False
        self._resize(key, storage.nbytes())
        return key

    def _resize(self, key: int, size: int) -> None:
        before = self._sizes.get(key, 0)
        if before == size:
            return
        self._sizes[key] = size
        self._events.append((key, size))
        self.live_bytes += size - before
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self._peak_at = len(self._events)


def _resizing(live: LiveBytes, resize: Callable[..., Any]) -> Callable[..., Any]:
    def resize_(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        if storage in live._keys:
            live._resize(live._keys[storage], size)
        return result

    return resize_


def _our_line(frame: FrameType | None) -> str:
    """Format the innermost frame of this package as `model/mlp.py:41 forward`.

    Most operators of a backward pass show the line that started it.
    """
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_PACKAGE) and not module.startswith(f"{_PACKAGE}.rehearse"):
            path = module.removeprefix(f"{_PACKAGE}.").replace(".", "/")
            return f"{path}.py:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


@contextmanager
def phase(live: LiveBytes, name: str) -> Iterator[None]:
    """Set the phase of storages created in this context."""
    before = live.phase
    live.phase = name
    try:
        yield
    finally:
        live.phase = before
