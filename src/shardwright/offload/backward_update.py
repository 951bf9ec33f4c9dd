"""Update behind the backward pass.

[Note: updates without the norm] Only clipping and skipped steps need the norm of the whole
gradient. Without both a parameter is updated as soon as its own gradient is complete, and the rest
of the backward pass hides the transfers of its moments. autograd adds a gradient to its parameter
after all computations that read the parameter; torch reports an error if one follows. The update
runs in the reverse of the order in which modules are used, which is the order of the gradients.

On a CPU the update runs between the operations of the backward pass. On a GPU whose states the host
updates, the training thread has to launch the backward pass meanwhile, so the update has a thread
of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all

import torch
from torch import Tensor

from shardwright.model.products.working_weights import WorkingWeights
from shardwright.offload.update_overlap import LaunchedUpdate, UpdateOverlap
from shardwright.optim.sharded_optimizer import UpdateUnit


class BackwardUpdate(UpdateOverlap):
    """Update of each bucket when the gradients of its parameters are complete.

    A `GradientListener`. Its update begins with the first gradient after `begin_step`, and
    otherwise, as without it, when the optimizer steps. It ends in `wait`, before the next pass.
    Each gradient is freed when its parameter is updated. For CPUs: on CUDA, FSDP2 completes
    gradients on another stream than training's, and kernels of updates would have to be ordered
    with both.
    """

    def __init__(
        self,
        units: Sequence[UpdateUnit],
        working_weights: WorkingWeights | None,
    ) -> None:
        """
        Args:
            units: in the order of their use.
        """
        # No module waits for a part of the update: all of it ends before the next pass.
        without_modules = [unit._replace(modules=()) for unit in reversed(units)]
        super().__init__(without_modules, working_weights)
        self._step: Callable[[], object] | None = None
        """Begins the update; None if the step's update does not begin in the backward pass."""
        self._complete: set[str] = set()
        """Parameters whose gradients are complete."""
        self._updated: set[str] = set()
        """Parameters whose last bucket is updated."""

    def sort(self, names: Iterable[str]) -> list[str]:
        """Return parameters, given in the model's order, about in that of their gradients."""
        backwards = list(names)[::-1]
        return sorted(backwards, key=self.get_unit)

    @property
    def is_active(self) -> bool:
        """True if the step's update begins in the backward pass: since `begin_step`."""
        return self._step is not None

    def begin_step(self, step: Callable[[], object]) -> None:
        """Begin the step's update by calling `step` when the first gradient is complete."""
        self.wait()
        self._step = step

    def launch(self, update: LaunchedUpdate) -> None:
        """Launch an update as far as gradients are complete; without `begin_step` all of it."""
        if self._step is None:
            self.wait()
        self._begin(update)
        if self._step is None:
            self.wait()

    def take_gradient(self, name: str) -> None:
        """Update all buckets, in their order, whose gradients are complete with this one."""
        if self._step is None:
            return
        assert name not in self._updated, f"the gradient of {name} has changed after its update"
        if not self._complete:
            self._step()
        self._complete.add(name)
        while self._update is not None and self._complete.issuperset(self._following_names):
            self._run_to_next_bucket(self._update)

    def end_gradients(self) -> None:
        """Nothing is left to do: `wait` updates the other buckets."""

    def end_bucket(
        self, names: Sequence[str], complete: Mapping[str, Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Cast working weights, and free gradients that are no longer needed."""
        super().end_bucket(names, complete, gradients)
        if self._step is None:
            return
        self._updated |= complete.keys()
        for parameter in complete.values():
            parameter.grad = None

    def wait(self) -> None:
        """Run the rest of the update; parameters without a gradient are not updated."""
        self._run_units(self._last_unit)
        self._forget_step()

    def abandon(self) -> None:
        """End a step whose gradient is not finite: its weights must not be used or saved."""
        self.close()
        self._is_incomplete = True

    def wait_on(self, unit: int, stream: torch.Stream) -> None:
        """Make another stream than training's wait for the update of a unit: it has ended."""

    def close(self) -> None:
        """Drop the rest of the update."""
        self._update = None
        self._forget_step()

    def _wait_for_unit(self, unit: int) -> None:
        """Do nothing: no module waits."""

    def _forget_step(self) -> None:
        self._step = None
        self._complete.clear()
        self._updated.clear()


class HostBackwardUpdate(BackwardUpdate):
    """The same for parameters on a CUDA device that are updated on the host.

    A thread waits for the copies of each gradient and its weights (`HostUpdate`), updates, and
    launches the copies of the new weights to the device. The training thread waits for it in
    `wait`. Gradients stay on the device, because their norm follows.
    """

    def __init__(self, units: Sequence[UpdateUnit], device: torch.device) -> None:
        """
        Args:
            units: in the order of their use.
        """
        # The backward pass may still read working weights, so the next forward pass casts them.
        super().__init__(units, working_weights=None)
        # The number of threads of an operation is a setting of the thread that calls it.
        self._executor = ThreadPoolExecutor(
            1, "host update", _set_up_thread, (device, torch.get_num_threads())
        )
        self._reported: set[str] = set()
        """Parameters whose copies are launched since `begin_step`."""
        self._tasks: list[Future[None]] = []
        self._is_stopped = False

    def take_gradient(self, name: str) -> None:
        """Launch copies to the host; once they end, the thread updates the complete buckets."""
        assert self._host_update is not None
        copied_event = self._host_update.launch_copies(name)
        if self._step is None:
            return
        assert name not in self._reported, f"the gradient of {name} has changed after its report"
        if not self._reported:
            self._step()
        self._reported.add(name)
        self._tasks.append(self._executor.submit(self._update_after, name, copied_event))

    def end_gradients(self) -> None:
        """Let training's stream wait for the copies, which end before its later work."""
        assert self._host_update is not None
        self._host_update.end_gradients()

    def end_bucket(
        self, names: Sequence[str], complete: Mapping[str, Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Keep gradients and working weights, which the device may read."""

    def wait(self) -> None:
        """Wait for the thread, and update what it has not; let training's stream wait for all
        weights."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.result()
        super().wait()
        if tasks:
            assert self._host_update is not None
            self._host_update.end_update()

    def abandon(self) -> None:
        """End a step whose gradient is not finite: its weights must not be used or saved."""
        self._stop()
        super().abandon()

    def close(self) -> None:
        """Drop the rest of the update, and end the thread."""
        self._stop()
        self._executor.shutdown()
        super().close()

    def _update_after(self, name: str, copied_event: torch.cuda.Event) -> None:
        if self._is_stopped or self._is_incomplete:
            return
        copied_event.synchronize()
        self._complete.add(name)
        while (
            not self._is_stopped
            and self._update is not None
            and self._complete.issuperset(self._following_names)
        ):
            self._run_to_next_bucket(self._update)

    def _stop(self) -> None:
        """Let the thread drop what it has not begun, and wait for the rest."""
        self._is_stopped = True
        wait_for_all(self._tasks)
        self._tasks.clear()

    def _forget_step(self) -> None:
        super()._forget_step()
        self._reported.clear()


def _set_up_thread(device: torch.device, num_threads: int) -> None:
    torch.cuda.set_device(device)
    torch.set_num_threads(num_threads)
