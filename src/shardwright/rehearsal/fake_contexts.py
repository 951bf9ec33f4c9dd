"""Contexts of a rehearsal: a process group without other ranks, and storage without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from unittest.mock import patch

import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.rehearsal.live_memory import LiveMemoryTracker, use_phase


@contextmanager
def use_fake_group(rank: int, world_size: int) -> Iterator[None]:
    """Use a process group whose collectives return immediately; none for a single rank.

    No work is complete until the step waits for it, so that a pipeline keeps the tensors it sends
    as long as with a slow receiver. Work of torch 2.15's group is always complete.
    """
    if world_size == 1:
        yield
        return
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with patch.object(FakeWork, "is_completed", lambda _work: False):
            yield
    finally:
        dist.destroy_process_group()


class FakeStorage(AbstractContextManager[None]):
    """Context in which the model gets fake storage; counts its bytes and DDP's buckets."""

    def __init__(self, fake: FakeTensorMode, tracker: LiveMemoryTracker) -> None:
        self._fake = fake
        self._tracker = tracker
        self._exit_stack = ExitStack()

    def __enter__(self) -> None:
        self._exit_stack.enter_context(self._fake)
        self._exit_stack.enter_context(self._tracker)
        self._exit_stack.enter_context(use_phase(self._tracker, "build"))

    def __exit__(self, *_: object) -> None:
        self._exit_stack.close()
