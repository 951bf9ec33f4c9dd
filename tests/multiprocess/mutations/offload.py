"""Patches that add wrong transfers between the device and a slower tier; see `reductions`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from shardwright.offload.activation_store import ScratchStore
from shardwright.offload.disk_store import DiskStore
from shardwright.offload.parameter_offload import ParameterOffload
from shardwright.offload.trained_block import TrainedBlock
from shardwright.offload.update_overlap import DeferredUpdate


@contextmanager
def lose_writes_of_one_bucket() -> Iterator[None]:
    """Close the swap of the first bucket without writing it."""
    original = DiskStore.swap_out

    def swap_out(self: DiskStore, swap: Any, ready_event: Any = None) -> None:
        if swap.index == 0:
            self.release(swap)
        else:
            original(self, swap, ready_event)

    with patch.object(DiskStore, "swap_out", swap_out):
        yield


@contextmanager
def lose_updates_of_weights() -> Iterator[None]:
    """Free updated weights without writing them."""

    def store_weights(self: TrainedBlock, _store: Any) -> None:
        self.is_changed = False

    with patch.object(TrainedBlock, "store_weights", store_weights):
        yield


@contextmanager
def forget_scale_of_gradients() -> Iterator[None]:
    """Update with gradients from the store as they were before clipping."""
    with patch.object(ParameterOffload, "scale_gradients", lambda _self, _factor: None):
        yield


@contextmanager
def read_weights_before_their_update() -> Iterator[None]:
    """Let no module and no gather wait for an update that overlaps with the forward pass."""
    with (
        patch.object(DeferredUpdate, "_install_wait", lambda *_: None),
        patch.object(DeferredUpdate, "wait_on", lambda *_: None),
    ):
        yield


@contextmanager
def read_saved_tensors_early() -> Iterator[None]:
    """Use the memory of a saved tensor before it has been read."""
    original: Callable[..., Any] = ScratchStore.read

    def read(self: ScratchStore, place: Any, num_bytes: int) -> tuple[Tensor, Callable[[], None]]:
        data, wait = original(self, place, num_bytes)
        wait()
        return torch.zeros_like(data), lambda: None

    with patch.object(ScratchStore, "read", read):
        yield
