"""Saving during training: a thread copies the state to host memory and then writes it.

The optimizer's update alone changes the state. So the copy can overlap with the forward and
backward passes of the next step; before its update, training waits until the copy is finished.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardwright.checkpoint.commit import Keep
from shardwright.checkpoint.disk import Disk
from shardwright.checkpoint.exchange import Ranks
from shardwright.checkpoint.pieces import Part
from shardwright.checkpoint.place import Place, place_of
from shardwright.checkpoint.save import PlannedSave, SavedCheckpoint, finish_save, plan_save
from shardwright.errors import SaveFailed

_ALIGNMENT_BYTES = 64


class HostCopy:
    """Host buffer that successive saves reuse.

    Allocating memory costs more than the copy (a page fault every 4 KiB, and pinning if there
    is a GPU).
    """

    def __init__(self) -> None:
        self._memory_N = torch.empty(0, dtype=torch.uint8)

    def take(self, tensors: Sequence[torch.Tensor], ready: torch.cuda.Event | None = None) -> list[torch.Tensor]:
        """Return contiguous copies, valid until the next call.

        Copies from a GPU are asynchronous, on a stream separate from training's, and start
        after the event `ready`.
        """
        starts = []
        num_bytes = 0
        for tensor in tensors:
            starts.append(num_bytes)
            num_bytes += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if num_bytes > self._memory_N.numel():
            # Free the old buffer first: never hold both.
            self._memory_N = torch.empty(0, dtype=torch.uint8)
            self._memory_N = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device is not None)
        copies = []
        with torch.no_grad(), _beside_the_training(device, ready):
            for start, tensor in zip(starts, tensors, strict=True):
                part = self._memory_N[start : start + tensor.numel() * tensor.element_size()]
                copies.append(part.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=device is not None))
        return copies


@contextmanager
def _beside_the_training(device: torch.device | None, ready: torch.cuda.Event | None) -> Iterator[None]:
    """Run the block on a separate CUDA stream, synchronised at the end, if there is a GPU."""
    if device is None:
        yield
        return
    stream = torch.cuda.Stream(device)
    if ready is not None:
        stream.wait_event(ready)
    with torch.cuda.stream(stream):  # also sets the thread's device, by default device 0
        yield
    stream.synchronize()


class BackgroundSaver:
    """Saver that writes on a thread, one checkpoint at a time, with its own process group.

    Every rank creates one and calls `save`, `save_now` and `wait` in the same order. If a save
    fails, the next of these calls raises the error on every rank. After `save` no tensor may
    change until `await_copy` has returned.
    """

    def __init__(self, *, timeout_seconds: float = 1800.0, disk: Disk | None = None) -> None:
        # The thread's collectives must not mix with training's, so they use a separate group,
        # in host memory.
        is_single = not (dist.is_available() and dist.is_initialized())
        self._group = None if is_single else dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self._ranks = Ranks(self._group)
        self._disk = disk
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-save")
        self._saving: Future[SavedCheckpoint] | None = None
        self._planned: PlannedSave | None = None
        self._copy = HostCopy()
        self._copied = threading.Event()
        self._copied.set()

    @property
    def is_saving(self) -> bool:
        """True while a save is being written.

        Ranks may see it end at different times, so no collective may depend on it.
        """
        return self._saving is not None and not self._saving.done()

    def save(
        self,
        root: str | Place,
        step: int,
        tensors: Mapping[str, torch.Tensor | Part],
        values: Mapping[str, Any],
        *,
        merged: Mapping[str, Any] | None = None,
        keep: Keep | None = None,
        best: bool = False,
    ) -> SavedCheckpoint | None:
        """Start to copy and write this rank's share. See `save_checkpoint`.

        Waits for the previous save if it is still running, and returns its result. The tensors
        must not change until `await_copy` has returned; a change that torch counts (not inside
        DTensors) makes the save fail.

        Raises:
            SaveFailed: the previous save failed (this one was not started), or the ranks
                disagree about the tensors.
        """
        previous = self.wait()
        plan = self._plan(step, tensors, values, merged)
        ready = _all_done_so_far([values for *_, values in plan.writing])
        place = place_of(root)
        self._copied.clear()
        self._saving = self._pool.submit(lambda: self._copy_and_finish(place, plan, ready, keep=keep, best=best))
        return previous

    def await_copy(self) -> None:
        """Wait until the tensors given to `save` have been copied; then they may change."""
        self._copied.wait()

    def _copy_and_finish(
        self, root: Place, planned: PlannedSave, ready: torch.cuda.Event | None, *, keep: Keep | None, best: bool
    ) -> SavedCheckpoint:
        """Copy, write and publish, on the thread; the result's seconds include the copy."""
        start = time.monotonic()
        try:
            planned = planned.copied(partial(self._copy.take, ready=ready))
        finally:
            self._copied.set()
        saved = finish_save(self._ranks, root, planned, keep=keep, best=best, disk=self._disk)
        return replace(saved, seconds=time.monotonic() - start)

    def save_now(
        self,
        root: str | Place,
        step: int,
        tensors: Mapping[str, torch.Tensor | Part],
        values: Mapping[str, Any],
        *,
        merged: Mapping[str, Any] | None = None,
        keep: Keep | None = None,
        best: bool = False,
    ) -> SavedCheckpoint:
        """Save without a copy and return at the end. See `save_checkpoint`.

        Raises:
            SaveFailed: this save failed; or the previous one, which was still running, did
                (this one was not started).
        """
        self.wait()
        plan = self._plan(step, tensors, values, merged)
        with _told_as_failed():
            return finish_save(self._ranks, place_of(root), plan, keep=keep, best=best, disk=self._disk)

    def wait(self) -> SavedCheckpoint | None:
        """Wait for the current save and return its result; None if there is none.

        Raises:
            SaveFailed: the save failed.
        """
        saving, self._saving = self._saving, None
        with _told_as_failed():
            return None if saving is None else saving.result()

    def close(self) -> SavedCheckpoint | None:
        """Wait for the current save and end the thread.

        Raises:
            SaveFailed: the last save failed.
        """
        try:
            return self.wait()
        finally:
            self._pool.shutdown()

    def abandon(self) -> None:
        """Give up the current save without waiting: after a failure a peer may be gone."""
        self._saving = None
        self._copied.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _plan(
        self, step: int, tensors: Mapping[str, torch.Tensor | Part], values: Mapping[str, Any], merged: Mapping[str, Any] | None
    ) -> PlannedSave:
        with _told_as_failed():
            plan = plan_save(self._ranks, step, tensors, values, merged, before=self._planned)
        # The next save needs only the assignment of boxes to ranks, so the tensors are
        # released.
        self._planned = replace(plan, writing=[], values={}, merged={})
        return plan


def _all_done_so_far(tensors: Sequence[torch.Tensor]) -> torch.cuda.Event | None:
    """Record an event after the GPU's work so far; None if no tensor is on a GPU."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device).record_event()


@contextmanager
def _told_as_failed() -> Iterator[None]:
    """Raise SaveFailed for errors of the process group, such as a lost rank or a timeout."""
    try:
        yield
    except RuntimeError as error:
        message = str(error).partition("\n")[0]
        raise SaveFailed(f"the checkpoint could not be saved: communication between ranks failed ({message})") from error
