"""Saving while the training goes on: a thread copies to host memory while gradients are computed, then writes.

Tensors of the state change in the optimizer's update alone. So the copy has the whole forward and backward pass of the next step,
and the training waits, before the update, for what is left of it.
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
    """Host memory that one save after the other is copied into.

    Fresh memory costs more than the copy (a page fault every 4 KiB, and pinning beside a GPU), so it is kept.
    """

    def __init__(self) -> None:
        self._memory_N = torch.empty(0, dtype=torch.uint8)

    def take(self, tensors: Sequence[torch.Tensor], ready: torch.cuda.Event | None = None) -> list[torch.Tensor]:
        """Contiguous copies, valid until the next call.

        From a GPU all copies are under way before the first is waited for, on a stream of their own beside the training's, once
        `ready` has come.
        """
        starts, total = [], 0
        for tensor in tensors:
            starts.append(total)
            total += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if total > self._memory_N.numel():
            self._memory_N = torch.empty(0, dtype=torch.uint8)  # the old before the new: never both
            self._memory_N = torch.empty(total, dtype=torch.uint8, pin_memory=device is not None)
        copies = []
        with torch.no_grad(), _beside_the_training(device, ready):
            for start, tensor in zip(starts, tensors, strict=True):
                part = self._memory_N[start : start + tensor.numel() * tensor.element_size()]
                copies.append(part.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=device is not None))
        return copies


@contextmanager
def _beside_the_training(device: torch.device | None, ready: torch.cuda.Event | None) -> Iterator[None]:
    """A CUDA stream of its own, waited for at the end; nothing without a GPU."""
    if device is None:
        yield
        return
    stream = torch.cuda.Stream(device)
    if ready is not None:
        stream.wait_event(ready)
    with torch.cuda.stream(stream):  # a thread's device is the first one until it is told another
        yield
    stream.synchronize()


class BackgroundSaver:
    """Saves on a thread, one checkpoint at a time, over a process group of its own.

    Every rank makes one, and calls `save`, `save_now` and `wait` in the same order. A save that failed is raised by the next of
    these calls, on every rank: it is never lost. After `save` no tensor may change before `await_copy` has returned.
    """

    def __init__(self, *, timeout_seconds: float = 1800.0, disk: Disk | None = None) -> None:
        # The thread's collectives must not mix with the training's, so they get a group of their own, on the host's memory.
        alone = not (dist.is_available() and dist.is_initialized())
        self._group = None if alone else dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
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
        """Whether a save is still being written. Ranks may see its end at different times: no collective may hang on it."""
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
        """Start copying and writing what this rank has to write; the arguments are those of `save_checkpoint`.

        Waits for the save before, if it is still going on, and returns what came of it. The tensors must stay as they are until
        `await_copy` has returned; a change that torch counts (not inside DTensors) makes the save fail.

        Raises:
            SaveFailed: the save before failed (this one was not started), or the ranks disagree about the tensors.
        """
        before = self.wait()
        planned = self._plan(step, tensors, values, merged)
        ready = _all_done_so_far([values for *_, values in planned.writing])
        self._copied.clear()
        self._saving = self._pool.submit(self._copy_and_finish, place_of(root), planned, ready, keep=keep, best=best)
        return before

    def await_copy(self) -> None:
        """Wait until what `save` was given has been copied: from then on it may change."""
        self._copied.wait()

    def _copy_and_finish(
        self, root: Place, planned: PlannedSave, ready: torch.cuda.Event | None, *, keep: Keep | None, best: bool
    ) -> SavedCheckpoint:
        """The thread's part of a save; its seconds are those of the copy, too."""
        began = time.monotonic()
        try:
            planned = planned.copied(partial(self._copy.take, ready=ready))
        finally:
            self._copied.set()
        saved = finish_save(self._ranks, root, planned, keep=keep, best=best, disk=self._disk)
        return replace(saved, seconds=time.monotonic() - began)

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
        """Save without a copy and return when it is done; the arguments are those of `save_checkpoint`.

        Raises:
            SaveFailed: this save failed, or the one before it, which was still going on (this one was not started).
        """
        self.wait()
        planned = self._plan(step, tensors, values, merged)
        with _told_as_failed():
            return finish_save(self._ranks, place_of(root), planned, keep=keep, best=best, disk=self._disk)

    def wait(self) -> SavedCheckpoint | None:
        """Wait for the save that is going on and return what came of it; None if none was.

        Raises:
            SaveFailed: it failed.
        """
        saving, self._saving = self._saving, None
        with _told_as_failed():
            return None if saving is None else saving.result()

    def close(self) -> SavedCheckpoint | None:
        """Wait, and end the thread.

        Raises:
            SaveFailed: the last save failed.
        """
        try:
            return self.wait()
        finally:
            self._pool.shutdown()

    def abandon(self) -> None:
        """Do not wait: the run is broken, and a peer that the save waits for may be gone."""
        self._saving = None
        self._copied.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _plan(
        self, step: int, tensors: Mapping[str, torch.Tensor | Part], values: Mapping[str, Any], merged: Mapping[str, Any] | None
    ) -> PlannedSave:
        with _told_as_failed():
            planned = plan_save(self._ranks, step, tensors, values, merged, before=self._planned)
        # Kept without tensors: only who writes what is of use to the next save.
        self._planned = replace(planned, writing=[], values={}, merged={})
        return planned


def _all_done_so_far(tensors: Sequence[torch.Tensor]) -> torch.cuda.Event | None:
    """Comes when a GPU has done what it was given so far; None where there is nothing on a GPU."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device).record_event()


@contextmanager
def _told_as_failed() -> Iterator[None]:
    """A group that lost a rank or waited too long is a failed save like any other; the training finds out by itself."""
    try:
        yield
    except RuntimeError as error:
        message = str(error).partition("\n")[0]
        raise SaveFailed(f"the checkpoint could not be saved: the ranks lost each other ({message})") from error
