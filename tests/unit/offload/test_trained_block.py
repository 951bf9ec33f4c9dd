"""Order of transfers and of freed memory of a block's trained weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shardwright.offload.activation_store import Wait
from shardwright.offload.store import TransferCounts
from shardwright.offload.trained_block import TrainedBlock, WeightMemory


class RecordingStore:
    """Store that records its calls, and the bytes on the device when a wait is called."""

    def __init__(self, weights: Tensor) -> None:
        self.counts = TransferCounts()
        self.num_bytes = 0
        self.weights = weights
        self.calls: list[tuple[str, int]] = []

    def add(self, num_bytes: int) -> int:
        return 0

    def fill(self, position: int, pieces: Iterable[Tensor]) -> None:
        pass

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def read(self, position: int, target: Tensor) -> Wait:
        self.calls.append(("read", target.numel()))
        return lambda: self.record("wait for the read")

    def write(self, position: int, source: Tensor) -> Wait:
        self.calls.append(("write", source.numel()))
        return lambda: self.record("wait for the write")

    def view(self, position: int, num_bytes: int) -> Tensor:
        raise AssertionError

    def close(self) -> None:
        pass

    def record(self, name: str) -> None:
        self.calls.append((name, self.weights.untyped_storage().nbytes()))


def test_memory_is_freed_when_its_transfers_have_ended() -> None:
    storage = torch.zeros(64, dtype=torch.uint8)
    weights = storage[:48]  # FSDP2 pads the last rank's shards
    store = RecordingStore(weights)
    block = TrainedBlock(0, 4096, [WeightMemory(weights, 64, 0)])
    storage.untyped_storage().resize_(0)
    block.launch(store)
    block.free_weights()
    assert store.calls == [("read", 48), ("wait for the read", 64)]
    assert storage.untyped_storage().nbytes() == 0
    store.calls.clear()
    block.launch(store)
    block.finish()
    block.is_changed = True
    block.store_weights(store)
    block.free_weights()
    assert store.calls[2:] == [("write", 48), ("wait for the write", 64)]
    assert storage.untyped_storage().nbytes() == 0
