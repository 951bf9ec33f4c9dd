"""Update on a stream of its own, behind the next forward pass.

[Note: weights that are still updated] With clipping no update begins before the whole gradient is
known, so nothing in its own step can hide the transfers of moments. The next forward pass can:
a block reads its own weights only. The update runs in the order in which modules are used, and
training's stream waits before each module for the update of that module's weights. Gradients are
kept until then. When a block begins, those of earlier blocks are freed. The same gradients and
saved tensors were on the device when the block's backward pass ended, so the peak does not rise.
All other readers and writers of weights and moments call `wait` first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.model.products.working_weights import WorkingWeights
from shardwright.optim.sharded_optimizer import UpdateUnit


class _UpdatedBucket(NamedTuple):
    unit: int
    event: torch.cuda.Event
    gradients: Sequence[Tensor]


class UpdateOverlap:
    """Stream of the update, and the waits of the modules that read the weights."""

    def __init__(
        self,
        units: Sequence[UpdateUnit],
        working_weights: WorkingWeights | None,
        device: torch.device,
    ) -> None:
        """
        Args:
            units: in the order of their use; each module waits for all units up to its own.
            working_weights: cast as soon as their parameters are updated.
        """
        self._device = device
        # Its short kernels run before those of the forward pass, which would delay the copies.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._working_weights = working_weights
        self._units = {name: index for index, unit in enumerate(units) for name in unit.names}
        for index, unit in enumerate(units):
            for module in unit.modules:
                self._install_wait(module, index)
        self._updated: deque[_UpdatedBucket] = deque()
        """Buckets that training's stream has not waited for, in order."""
        self._events: dict[int, torch.cuda.Event] = {}
        """End of the last update of each unit."""
        self._is_pending = False

    def get_unit(self, name: str) -> int:
        """Return the unit of a parameter. The update has to follow their order."""
        return self._units[name]

    @contextmanager
    def launch(self) -> Iterator[None]:
        """Return the context in which an update is launched, after training's stream."""
        self.wait()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._is_pending = True
        with torch.cuda.stream(self._stream):
            yield

    def end_bucket(
        self, names: Sequence[str], complete: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Note that the update of a bucket has been launched.

        Args:
            names: its parameters, in the order of their units.
            complete: those that no later bucket updates.
            gradients: their gradients.
        """
        if self._working_weights is not None:
            self._working_weights.update(complete)
        event = self._stream.record_event()
        units = [self._units[name] for name in names]
        self._events |= dict.fromkeys(units, event)
        self._updated.append(_UpdatedBucket(units[0], event, gradients))

    def wait(self) -> None:
        """Make the current stream wait for the whole update and its last copies."""
        if self._is_pending:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._updated.clear()
            self._is_pending = False

    def wait_on(self, unit: int, stream: torch.cuda.Stream) -> None:
        """Make another stream than training's wait for the update of a unit."""
        if unit in self._events:
            stream.wait_event(self._events[unit])

    def _install_wait(self, module: nn.Module, unit: int) -> None:
        def wait(_module: nn.Module, _arguments: Any) -> None:
            self._wait_for_unit(unit)

        # Before the hooks of others, which may read the weights.
        module.register_forward_pre_hook(wait, prepend=True)

    def _wait_for_unit(self, unit: int) -> None:
        """Make the current stream wait for the update of all units up to one.

        Their gradients are freed then, for later work of the stream on which they were computed.
        """
        while self._updated and self._updated[0].unit <= unit:
            torch.cuda.current_stream(self._device).wait_event(self._updated[0].event)
            self._updated.popleft()
