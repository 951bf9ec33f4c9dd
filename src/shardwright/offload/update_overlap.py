"""Update behind the next forward pass.

[Note: weights that are still updated] With clipping no update begins before the whole gradient is
known, so nothing in its own step can hide the transfers of moments. The next forward pass can:
a block reads its own weights only. The update runs in the order in which modules are used, and
each module waits for the update of its own weights. Gradients are kept until then. When a block
begins, those of earlier blocks are freed. The same gradients and saved tensors were on the device
when the block's backward pass ended, so the peak does not rise. All other readers and writers of
weights and moments call `wait` first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.errors import OffloadFailed
from shardwright.model.products.working_weights import WorkingWeights
from shardwright.offload.host_update import HostUpdate
from shardwright.offload.store import CopyClock
from shardwright.optim.sharded_optimizer import UpdateUnit

LaunchedUpdate = Iterator[Sequence[str]]
"""Update bucket by bucket: before each it returns the names of its parameters, by unit."""


class UpdateOverlap(ABC):
    """Waits of the modules that read weights which are still updated."""

    def __init__(self, units: Sequence[UpdateUnit], working_weights: WorkingWeights | None) -> None:
        """
        Args:
            units: in the order of their use; each module waits for all units up to its own.
            working_weights: cast as soon as their parameters are updated.
        """
        self._working_weights = working_weights
        self._units = {name: index for index, unit in enumerate(units) for name in unit.names}
        self._last_unit = len(units) - 1
        self._update: LaunchedUpdate | None = None
        """The rest of the last update; None if it has ended."""
        self._following_names: Sequence[str] = ()
        """Parameters of the next bucket."""
        self._is_incomplete = False
        """True if the update has failed."""
        self._host_update: HostUpdate | None = None
        for index, unit in enumerate(units):
            for module in unit.modules:
                self._install_wait(module, index)

    def follow(self, host_update: HostUpdate) -> None:
        """Update on the host by these copies."""
        self._host_update = host_update

    @property
    def is_pending(self) -> bool:
        """True if buckets of the last update are not updated yet."""
        return self._update is not None

    def get_unit(self, name: str) -> int:
        """Return the unit of a parameter."""
        return self._units[name]

    def sort(self, names: Iterable[str]) -> list[str]:
        """Return parameters, given in the model's order, in that of the update."""
        return sorted(names, key=self.get_unit)

    def launch(self, update: LaunchedUpdate) -> None:
        """Launch an update after the gradients; at least, run it to its first bucket."""
        self.wait()
        self._begin(update)

    def end_bucket(
        self, names: Sequence[str], complete: Mapping[str, Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Cast the working weights of a bucket whose update has been launched.

        Args:
            names: its parameters, in the order of their units.
            complete: those that no later bucket updates, by name.
            gradients: gradients of all.
        """
        if self._working_weights is not None:
            self._working_weights.mark_changed(complete.values())
            self._working_weights.update(complete.values())

    @abstractmethod
    def wait(self) -> None:
        """Make the current stream wait for the whole update and its last copies."""

    @abstractmethod
    def wait_on(self, unit: int, stream: torch.Stream) -> None:
        """Make another stream than training's wait for the update of a unit."""

    @abstractmethod
    def close(self) -> None:
        """End the update; nothing reads the weights after it."""

    @abstractmethod
    def _wait_for_unit(self, unit: int) -> None:
        """Make the current stream wait for the update of all units up to one."""

    @property
    def _following_unit(self) -> int:
        """First unit of the next bucket."""
        return self._units[self._following_names[0]]

    def _begin(self, update: LaunchedUpdate) -> None:
        """Run an update to its first bucket."""
        if self._working_weights is not None:
            # The forward pass casts no weight before its update.
            self._working_weights.mark_current()
        self._update = update
        self._run_to_next_bucket(update)

    def _run_units(self, last: int) -> None:
        """Run the update of all units up to one.

        Raises:
            OffloadFailed: the update failed, now or before.
        """
        if self._is_incomplete:
            raise OffloadFailed("the last update of offloaded states has failed")
        while self._update is not None and self._following_unit <= last:
            self._run_to_next_bucket(self._update)

    def _run_to_next_bucket(self, update: LaunchedUpdate) -> None:
        self._is_incomplete = True
        names = next(update, None)
        self._is_incomplete = False
        if names is None:
            self._update = None
        else:
            self._following_names = names

    def _install_wait(self, module: nn.Module, unit: int) -> None:
        def wait(_module: nn.Module, _arguments: Any) -> None:
            self._wait_for_unit(unit)

        # Before the hooks of others, which may read the weights.
        module.register_forward_pre_hook(wait, prepend=True)


class _UpdatedBucket(NamedTuple):
    unit: int
    event: torch.cuda.Event
    gradients: Sequence[Tensor]


class StreamedUpdate(UpdateOverlap):
    """Update on a stream of its own; the host waits for nothing.

    [Note: launches ahead] The host launches the first unit's update at once, and that of each
    further unit before the forward pass of the unit before it. If it launched a whole update at
    once, the device would have no forward pass to run meanwhile.
    """

    def __init__(
        self,
        units: Sequence[UpdateUnit],
        working_weights: WorkingWeights | None,
        device: torch.device,
    ) -> None:
        super().__init__(units, working_weights)
        self._device = device
        self.clock: CopyClock | None = None
        """Measures the waits of training's stream, if the optimizer has set it."""
        # Its short kernels run before those of the forward pass, which would delay the copies.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._updated: deque[_UpdatedBucket] = deque()
        """Buckets that training's stream has not waited for, in order."""
        self._events: dict[int, torch.cuda.Event] = {}
        """End of the last update of each unit."""
        self._is_pending = False

    def launch(self, update: LaunchedUpdate) -> None:
        """Launch the update of the first unit, after training's stream."""
        self.wait()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            super().launch(update)
            self._is_pending = True
            if self._update is not None:
                self._run_units(self._following_unit)

    def end_bucket(
        self, names: Sequence[str], complete: Mapping[str, Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Note the event of a bucket, and keep its gradients."""
        super().end_bucket(names, complete, gradients)
        event = self._stream.record_event()
        units = [self._units[name] for name in names]
        self._events |= dict.fromkeys(units, event)
        self._updated.append(_UpdatedBucket(units[0], event, gradients))

    def wait(self) -> None:
        """Make the current stream wait for the whole update and its last copies."""
        if self._is_pending:
            self._launch_units(self._last_unit)
            self._end()

    def wait_on(self, unit: int, stream: torch.Stream) -> None:
        """Make another stream than training's wait for the update of a unit."""
        self._launch_units(unit + 1)
        if unit in self._events:
            stream.wait_event(self._events[unit])

    def close(self) -> None:
        """Drop the rest of the update, and wait for what reads and writes host memory."""
        self._update = None
        self._end()

    def _end(self) -> None:
        with self._time_wait():
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._updated.clear()
        self._is_pending = False

    def _wait_for_unit(self, unit: int) -> None:
        """Make the current stream wait for the update of all units up to one.

        Their gradients are freed then, for later work of the stream on which they were computed.
        """
        self._launch_units(unit + 1)
        if not self._updated or self._updated[0].unit > unit:
            return
        with self._time_wait():
            while self._updated and self._updated[0].unit <= unit:
                torch.cuda.current_stream(self._device).wait_event(self._updated[0].event)
                self._updated.popleft()

    def _time_wait(self) -> AbstractContextManager[None]:
        return nullcontext() if self.clock is None else self.clock.time_wait()

    def _launch_units(self, last: int) -> None:
        with torch.cuda.stream(self._stream):
            self._run_units(last)


class DeferredUpdate(UpdateOverlap):
    """Update of which the host runs, before each module, what the module's weights need.

    For transfers that the host waits for: the next ones run while it computes the module, or
    while the device does. The update runs on the current stream.
    """

    def wait(self) -> None:
        """Run the rest of the update."""
        self._run_units(self._last_unit)

    def wait_on(self, unit: int, stream: torch.Stream) -> None:
        """Run the update of a unit, and make another stream wait for it."""
        self._run_units(unit)
        if isinstance(stream, torch.cuda.Stream):
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    def close(self) -> None:
        """Drop the rest of the update."""
        self._update = None

    def _wait_for_unit(self, unit: int) -> None:
        """Run the update of all units up to one."""
        self._run_units(unit)


class HostDeferredUpdate(DeferredUpdate):
    """The same on the host of a CUDA device: before it launches a module, it updates the module's
    weights, while the device computes the modules before."""

    def end_bucket(
        self, names: Sequence[str], complete: Mapping[str, Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Cast the working weights of a bucket behind the copies of its weights."""
        assert self._host_update is not None
        self._host_update.order_after_copies()
        super().end_bucket(names, complete, gradients)

    def wait_on(self, unit: int, stream: torch.Stream) -> None:
        """Run the update of a unit, and make another stream wait for its weights."""
        self._run_units(unit)
        assert self._host_update is not None
        self._host_update.order_after_copies(stream)
