"""Live tensor bytes of a rank: their peak, and the operators that created them.

Works on fake tensors too. Every storage counts once, however many views it has, until Python
frees it. Resizing counts as well: FSDP2 frees and allocates memory by resizing storages.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shardwright.numerics import get_local_tensor

_PACKAGE = "shardwright"
_STAND_INS = f"{_PACKAGE}.rehearsal.fake_"
"""Modules that stand for others; what they allocate belongs to their callers."""


@dataclass(frozen=True)
class StorageOrigin:
    """Operator that created a storage, and the innermost line of shardwright that called it."""

    kind: str
    operator: str
    source_line: str


@dataclass(frozen=True)
class MemoryContribution:
    """Bytes and tensors of one origin that were live at the peak."""

    origin: StorageOrigin
    num_bytes: int
    num_tensors: int


class StorageChange(NamedTuple):
    """Allocation, resize or release of a storage."""

    origin: StorageOrigin
    bytes_before: int
    bytes_after: int


class LiveMemoryTracker(TorchDispatchMode):
    """Mode that counts the bytes of all storages created under it or registered with
    `register_tensors`.

    Args:
        device_type: count storages of this type of device only; None counts all.

    Attributes:
        live_bytes: live bytes now.
        peak_bytes: maximum of `live_bytes` since the last `reset_peak`.
        phase: `StorageOrigin.kind` of new storages.

    >>> with LiveMemoryTracker() as live:
    ...     x = torch.ones(256)
    ...     y = x + 1
    ...     del x
    >>> live.live_bytes, live.peak_bytes
    (1024, 2048)
    """

    def __init__(self, device_type: str | None = None) -> None:
        super().__init__()
        self._device_type = device_type
        self.phase = "other"
        self.live_bytes = 0
        self.peak_bytes = 0
        self._is_excluding = False
        self._storage_bytes: dict[int, int] = {}
        self._events: list[tuple[int, int]] = []
        self._origins: dict[int, StorageOrigin] = {}
        self._keys: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._next_key = 0
        self._peak_event = 0

    def __enter__(self) -> LiveMemoryTracker:
        self._resizes = self.track_resizes()
        self._resizes.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self._resizes.__exit__(*details)

    @contextmanager
    def track_resizes(self) -> Iterator[None]:
        """Count storages that are freed and allocated again by resizing."""
        with patch.object(
            torch.UntypedStorage, "resize_", _wrap_resize(self, torch.UntypedStorage.resize_)
        ):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.record(func, result)
        return result

    def record(self, func: Any, result: Any) -> None:
        """Count an operator's new storages; for modes that call operators themselves."""
        for value in (result,) if isinstance(result, Tensor) else tree_iter(result):
            if isinstance(value, Tensor) and self._is_counted(value):
                self._track_tensor(value, func)

    def register_tensors(self, tensors: Iterable[Tensor], kind: str) -> int:
        """Give tensors an origin, count those that are not counted yet, return their bytes."""
        total = 0
        with use_phase(self, kind):
            for tensor in tensors:
                key = self._track_tensor(tensor, None)
                self._origins[key] = StorageOrigin(kind, "", "")
                total += self._storage_bytes[key]
        return total

    @contextmanager
    def exclude_new_tensors(self) -> Iterator[None]:
        """Never count the tensors created in this context: they stand for another tier's
        memory."""
        self._is_excluding = True
        try:
            yield
        finally:
            self._is_excluding = False

    def reset_peak(self) -> None:
        """Restart the measurement of the peak."""
        self.peak_bytes = self.live_bytes
        self._peak_event = len(self._events)

    def list_contributions(self) -> list[MemoryContribution]:
        """Sum the bytes that were live at the peak by origin, largest first."""
        live: dict[int, int] = {}
        for key, size in self._events[: self._peak_event]:
            if size:
                live[key] = size
            else:
                live.pop(key, None)
        totals: dict[StorageOrigin, tuple[int, int]] = {}
        for key, size in live.items():
            bytes_so_far, count = totals.get(self._origins[key], (0, 0))
            totals[self._origins[key]] = (bytes_so_far + size, count + 1)
        contributions = [
            MemoryContribution(origin, size, count) for origin, (size, count) in totals.items()
        ]
        return sorted(contributions, key=lambda contribution: -contribution.num_bytes)

    @property
    def num_changes(self) -> int:
        """Number of changes so far."""
        return len(self._events)

    def list_changes(self, first: int, last: int) -> list[StorageChange]:
        """List the changes from `first` up to `last`, which is not included."""
        sizes = dict(self._events[:first])
        changes = []
        for key, size in self._events[first:last]:
            changes.append(StorageChange(self._origins[key], sizes.get(key, 0), size))
            sizes[key] = size
        return changes

    def count_live_storages(self, position: int) -> Counter[tuple[StorageOrigin, int]]:
        """Count the storages that were live before change `position`, by origin and bytes."""
        sizes = dict(self._events[:position])
        return Counter((self._origins[key], size) for key, size in sizes.items() if size)

    def _is_counted(self, tensor: Tensor) -> bool:
        if self._device_type is None:
            return True
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        return device.type == self._device_type

    def _track_tensor(self, tensor: Tensor, func: Any) -> int:
        storage = get_local_tensor(tensor).untyped_storage()
        known = self._keys.get(storage)
        if known is not None:
            return known
        key = self._next_key
        self._next_key += 1
        self._keys[storage] = key
        if func is None:
            self._origins[key] = StorageOrigin(self.phase, "", "")
        else:
            operator = func.name().partition("::")[2].partition(".")[0]
            self._origins[key] = StorageOrigin(
                self.phase, operator, _find_package_line(sys._getframe(3))
            )
        weakref.finalize(storage, self._set_storage_bytes, key, 0).atexit = False
        self._set_storage_bytes(key, 0 if self._is_excluding else storage.nbytes())
        return key

    def _set_storage_bytes(self, key: int, size: int) -> None:
        before = self._storage_bytes.get(key, 0)
        if before == size:
            return
        self._storage_bytes[key] = size
        self._events.append((key, size))
        self.live_bytes += size - before
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self._peak_event = len(self._events)


def _wrap_resize(tracker: LiveMemoryTracker, resize: Callable[..., Any]) -> Callable[..., Any]:
    def resize_(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        if storage in tracker._keys:
            tracker._set_storage_bytes(tracker._keys[storage], size)
        return result

    return resize_


def _find_package_line(frame: FrameType | None) -> str:
    """Format the innermost frame of this package as `model/mlp.py:41 forward`.

    Most operators of a backward pass show the line that started it.
    """
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_PACKAGE) and not module.startswith(_STAND_INS):
            path = module.removeprefix(f"{_PACKAGE}.").replace(".", "/")
            return f"{path}.py:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


@contextmanager
def use_phase(tracker: LiveMemoryTracker, name: str) -> Iterator[None]:
    """Set the phase of storages created in this context."""
    before = tracker.phase
    tracker.phase = name
    try:
        yield
    finally:
        tracker.phase = before
