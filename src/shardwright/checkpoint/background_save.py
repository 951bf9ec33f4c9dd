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

from shardwright.checkpoint.commit import RetentionPolicy
from shardwright.checkpoint.disk import Disk
from shardwright.checkpoint.host_buffer import HostBuffer
from shardwright.checkpoint.local_tensors import ParameterShard
from shardwright.checkpoint.rank_group import RankGroup
from shardwright.checkpoint.save_plan import SavePlan, plan_save
from shardwright.checkpoint.storage_path import StoragePath, parse_storage_path
from shardwright.checkpoint.tensor_saving import SavedCheckpoint, finish_save
from shardwright.errors import SaveFailed

SAVE_THREAD_NAME = "checkpoint-save"
"""Prefix of the names of the threads that save."""


class BackgroundSaver:
    """Saver that writes on a thread, one checkpoint at a time, with its own process group.

    Every rank creates one and calls `save`, `save_and_wait` and `wait` in the same order. If a save
    fails, the next of these calls raises the error on every rank. After `save` no tensor may
    change until `wait_for_copy` has returned.
    """

    def __init__(self, *, timeout_seconds: float = 1800.0, disk: Disk | None = None) -> None:
        # The thread's collectives must not mix with training's, so they use a separate group,
        # in host memory.
        is_single = not (dist.is_available() and dist.is_initialized())
        group = (
            None
            if is_single
            else dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        )
        assert group is None or isinstance(group, dist.ProcessGroup)  # every rank is in it
        self._group = group
        self._rank_group = RankGroup(self._group)
        self._disk = disk
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=SAVE_THREAD_NAME)
        self._pending_save: Future[SavedCheckpoint] | None = None
        self._previous_plan: SavePlan | None = None
        self._host_buffer = HostBuffer()
        self._copy_finished = threading.Event()
        self._copy_finished.set()

    @property
    def is_saving(self) -> bool:
        """True while a save is being written.

        Ranks may see it end at different times, so no collective may depend on it.
        """
        return self._pending_save is not None and not self._pending_save.done()

    def save(
        self,
        root: str | StoragePath,
        step: int,
        tensors: Mapping[str, torch.Tensor | ParameterShard],
        values: Mapping[str, Any],
        *,
        merged_values: Mapping[str, Any] | None = None,
        retention: RetentionPolicy | None = None,
        is_best: bool = False,
    ) -> SavedCheckpoint | None:
        """Start to copy and write this rank's share. See `save_checkpoint`.

        Waits for the previous save if it is still running, and returns its result. The tensors
        must not change until `wait_for_copy` has returned; a change that torch counts (not inside
        DTensors) makes the save fail.

        Raises:
            SaveFailed: the previous save failed (this one was not started), or the ranks
                disagree about the tensors.
        """
        previous = self.wait()
        plan = self._plan_save(step, tensors, values, merged_values)
        ready = _record_ready_event(plan.list_tensors())
        place = parse_storage_path(root)
        self._copy_finished.clear()
        self._pending_save = self._pool.submit(
            lambda: self._copy_and_finish(place, plan, ready, retention=retention, is_best=is_best)
        )
        return previous

    def wait_for_copy(self) -> None:
        """Wait until the tensors given to `save` may change: they have been copied, or written.

        Offloaded tensors are written without a copy, so with them it waits for the whole save.
        """
        self._copy_finished.wait()

    def _copy_and_finish(
        self,
        root: StoragePath,
        plan: SavePlan,
        ready_event: torch.cuda.Event | None,
        *,
        retention: RetentionPolicy | None,
        is_best: bool,
    ) -> SavedCheckpoint:
        """Copy, write and publish, on the thread; the result's seconds include the copy."""
        start = time.monotonic()
        try:
            plan = plan.copy_tensors(
                partial(self._host_buffer.copy_tensors, ready_event=ready_event)
            )
            if not plan.offloaded_names:
                self._copy_finished.set()
            saved = finish_save(
                self._rank_group, root, plan, retention=retention, is_best=is_best, disk=self._disk
            )
        finally:
            self._copy_finished.set()
        return replace(saved, seconds=time.monotonic() - start)

    def save_and_wait(
        self,
        root: str | StoragePath,
        step: int,
        tensors: Mapping[str, torch.Tensor | ParameterShard],
        values: Mapping[str, Any],
        *,
        merged_values: Mapping[str, Any] | None = None,
        retention: RetentionPolicy | None = None,
        is_best: bool = False,
    ) -> SavedCheckpoint:
        """Save without a copy and return at the end. See `save_checkpoint`.

        Raises:
            SaveFailed: this save failed; or the previous one, which was still running, did
                (this one was not started).
        """
        self.wait()
        plan = self._plan_save(step, tensors, values, merged_values)
        with _raise_as_save_failed():
            return finish_save(
                self._rank_group,
                parse_storage_path(root),
                plan,
                retention=retention,
                is_best=is_best,
                disk=self._disk,
            )

    def wait(self) -> SavedCheckpoint | None:
        """Wait for the current save and return its result; None if there is none.

        Raises:
            SaveFailed: the save failed.
        """
        saving, self._pending_save = self._pending_save, None
        with _raise_as_save_failed():
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
        """Abandon the current save without waiting: after a failure a peer may be gone."""
        self._pending_save = None
        self._copy_finished.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _plan_save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor | ParameterShard],
        values: Mapping[str, Any],
        merged_values: Mapping[str, Any] | None,
    ) -> SavePlan:
        with _raise_as_save_failed():
            plan = plan_save(
                self._rank_group,
                step,
                tensors,
                values,
                merged_values,
                previous_plan=self._previous_plan,
            )
        # The next save needs only the assignment of boxes to ranks, so the tensors are
        # released.
        self._previous_plan = replace(plan, local_writes=[], values={}, merged_values={})
        return plan


def _record_ready_event(tensors: Sequence[torch.Tensor]) -> torch.cuda.Event | None:
    """Record an event after the GPU's work so far; None if no tensor is on a GPU."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device).record_event()


@contextmanager
def _raise_as_save_failed() -> Iterator[None]:
    """Raise SaveFailed for errors of the process group, such as a lost rank or a timeout."""
    try:
        yield
    except RuntimeError as error:
        message = str(error).partition("\n")[0]
        raise SaveFailed(
            f"the checkpoint could not be saved: communication between ranks failed ({message})"
        ) from error
