"""Saving while the training goes on: it waits for a copy to host memory, a thread does the rest."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.checkpoint.disk import LOCAL_DISK, Disk
from shardwright.checkpoint.exchange import Ranks
from shardwright.checkpoint.pieces import Part
from shardwright.checkpoint.save import SavedCheckpoint, finish_save, plan_save


class BackgroundSaver:
    """Saves on a thread, one checkpoint at a time, over a process group of its own.

    Every rank makes one, and calls `save` and `wait` in the same order. A save that failed is raised by the next `save` or `wait`,
    on every rank: it is never lost.
    """

    def __init__(self, *, disk: Disk = LOCAL_DISK) -> None:
        # The thread's collectives must not mix with the training's, so they get a group of their own, on the host's memory.
        alone = not (dist.is_available() and dist.is_initialized())
        self._group = None if alone else dist.new_group(backend="gloo")
        self._ranks = Ranks(self._group)
        self._disk = disk
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-save")
        self._saving: Future[SavedCheckpoint] | None = None

    def save(
        self,
        root: str | Path,
        step: int,
        tensors: Mapping[str, torch.Tensor | Part],
        values: Mapping[str, Any],
        *,
        keep_last: int | None = None,
        best: bool = False,
    ) -> SavedCheckpoint | None:
        """Copy what this rank has to write and start writing; the arguments are those of `save_checkpoint`.

        Waits for the save before, if it is still going on, and returns what came of it.

        Raises:
            SaveFailed: the save before failed (this one was not started), or the ranks disagree about the tensors.
        """
        before = self.wait()
        planned = plan_save(self._ranks, step, tensors, values).copied()
        self._saving = self._pool.submit(
            finish_save, self._ranks, Path(root), planned, keep_last=keep_last, best=best, disk=self._disk
        )
        return before

    def wait(self) -> SavedCheckpoint | None:
        """Wait for the save that is going on and return what came of it; None if none was.

        Raises:
            SaveFailed: it failed.
        """
        saving, self._saving = self._saving, None
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
