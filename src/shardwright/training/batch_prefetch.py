"""Reading of the next step's micro-batches in a thread while the current step runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from shardwright.data.loader import MicroBatch


class BatchPrefetcher:
    """Reader of a step's micro-batches, one step ahead; for a GPU into pinned memory.

    One thread does all reading, so a dataset is never read by two at once. Close it by leaving its
    context.
    """

    def __init__(
        self, read_micro_batches: Callable[[int], list[MicroBatch]], device: torch.device
    ) -> None:
        """
        Args:
            read_micro_batches: Returns the micro-batches of a data step.
            device: Device on which the rank computes.
        """
        self._read_micro_batches = read_micro_batches
        self._device = device
        self._thread = ThreadPoolExecutor(1, "read-batches", initializer=self._choose_device)
        self._next: tuple[int, Future[list[MicroBatch]]] | None = None

    def __enter__(self) -> BatchPrefetcher:
        return self

    def read(self, step: int, next_step: int | None) -> list[MicroBatch]:
        """Return the micro-batches of a data step, and start to read those of `next_step`.

        What was read ahead for another step (before a rollback) is discarded.

        Raises:
            Errors of reading this step, also if it was read ahead.
        """
        if self._next is None or self._next[0] != step:
            self._next = (step, self._thread.submit(self._read, step))
        micro_batches = self._next[1].result()
        self._next = (
            None if next_step is None else (next_step, self._thread.submit(self._read, next_step))
        )
        return micro_batches

    def _choose_device(self) -> None:
        # Pinning memory starts CUDA on the thread's current device, which is 0 in a new thread.
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _read(self, step: int) -> list[MicroBatch]:
        micro_batches = self._read_micro_batches(step)
        if self._device.type == "cuda":
            return [batch.pin_memory() for batch in micro_batches]
        return micro_batches

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
