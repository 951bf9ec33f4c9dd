"""Count how often the host waits for a CUDA device."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch

_MESSAGE = "called a synchronizing CUDA operation"


class HostWaitCounter:
    """Count the waits of the host, on all threads, from the construction until `end`.

    torch warns of operations that wait, such as `.item()` and copies that are not asynchronous
    (`torch.cuda.set_sync_debug_mode`). It does not warn of waits for a device, a stream or an
    event, whose functions are therefore replaced meanwhile. Collectives are not seen.
    """

    def __init__(self) -> None:
        self._num_waits = 0
        self._context = contextlib.ExitStack()
        self._context.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("always", message=_MESSAGE)
        self._context.enter_context(
            patch.object(warnings, "showwarning", self._receive_warning(warnings.showwarning))
        )
        for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream):
            replaced = self._count_calls(owner.synchronize)
            self._context.enter_context(patch.object(owner, "synchronize", replaced))
        self._context.callback(torch.cuda.set_sync_debug_mode, "default")
        torch.cuda.set_sync_debug_mode("warn")

    def end(self) -> int:
        """Stop counting; return the number of waits."""
        self._context.close()
        return self._num_waits

    def _receive_warning(self, show: Callable[..., None]) -> Callable[..., None]:
        def receive(message: Warning | str, *args: Any, **options: Any) -> None:
            if str(message).startswith(_MESSAGE):
                self._num_waits += 1
            else:
                show(message, *args, **options)

        return receive

    def _count_calls(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            self._num_waits += 1
            return function(*args, **options)

        return call
