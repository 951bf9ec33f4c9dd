"""Saving while the training goes on: it waits for a copy to host memory, a thread does the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
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

    def take(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Contiguous copies, valid until the next call; from a GPU all copies are under way before the first is waited for."""
        starts, total = [], 0
        for tensor in tensors:
            starts.append(total)
            total += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        if total > self._memory_N.numel():
            self._memory_N = torch.empty(0, dtype=torch.uint8)  # the old before the new: never both
            self._memory_N = torch.empty(total, dtype=torch.uint8, pin_memory=on_gpu)
        copies = []
        for start, tensor in zip(starts, tensors, strict=True):
            part = self._memory_N[start : start + tensor.numel() * tensor.element_size()]
            copies.append(part.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=on_gpu))
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies


class BackgroundSaver:
    """Saves on a thread, one checkpoint at a time, over a process group of its own.

    Every rank makes one, and calls `save`, `save_now` and `wait` in the same order. A save that failed is raised by the next of
    these calls, on every rank: it is never lost.
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
        """Copy what this rank has to write and start writing; the arguments are those of `save_checkpoint`.

        Waits for the save before, if it is still going on, and returns what came of it.

        Raises:
            SaveFailed: the save before failed (this one was not started), or the ranks disagree about the tensors.
        """
        before = self.wait()
        planned = self._plan(step, tensors, values, merged).copied(self._copy.take)
        self._saving = self._pool.submit(finish_save, self._ranks, place_of(root), planned, keep=keep, best=best, disk=self._disk)
        return before

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
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _plan(
        self, step: int, tensors: Mapping[str, torch.Tensor | Part], values: Mapping[str, Any], merged: Mapping[str, Any] | None
    ) -> PlannedSave:
        with _told_as_failed():
            planned = plan_save(self._ranks, step, tensors, values, merged, before=self._planned)
        # Kept without tensors: only who writes what is of use to the next save.
        self._planned = replace(planned, writing=[], values={}, merged={})
        return planned


@contextmanager
def _told_as_failed() -> Iterator[None]:
    """A group that lost a rank or waited too long is a failed save like any other; the training finds out by itself."""
    try:
        yield
    except RuntimeError as error:
        message = str(error).partition("\n")[0]
        raise SaveFailed(f"the checkpoint could not be saved: the ranks lost each other ({message})") from error
