"""Saving on a thread: what is saved is what was there when `save` was called; failures are told, on every rank."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwright.checkpoint.background import BackgroundSaver
from shardwright.checkpoint.disk import LOCAL_DISK, Disk
from shardwright.checkpoint.load import load_checkpoint
from shardwright.errors import SaveFailed
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_checkpoint_failures import FullDisk


class WaitingDisk(Disk):
    """Writes nothing until it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def write(self, descriptor: int, data: memoryview) -> None:
        assert self.go.wait(30)
        super().write(descriptor, data)


def train_while_saving(root: str) -> None:
    rank, disk = dist.get_rank(), WaitingDisk()
    saver = BackgroundSaver(disk=disk)
    weight, shared = torch.full((8,), float(rank)), torch.arange(5.0)
    assert saver.save(root, 1, {f"w{rank}": weight, "shared": shared}, {"step": 1}) is None
    for _ in range(3):  # the training's own collectives go on meanwhile, and its tensors change
        dist.all_reduce(weight)
        shared.zero_()
    disk.go.set()
    saved = saver.save(root, 2, {f"w{rank}": weight, "shared": shared}, {"step": 2})
    assert saved is not None
    assert saved.step == 1
    last = saver.close()
    assert last is not None
    assert last.step == 2
    old = {f"w{rank}": torch.zeros(8), "shared": torch.zeros(5)}
    assert load_checkpoint(saved.path, old) == {"step": 1}
    assert torch.equal(old[f"w{rank}"], torch.full((8,), float(rank)))
    assert torch.equal(old["shared"], torch.arange(5.0))


def fail_in_the_background(root: str) -> str:
    rank = dist.get_rank()
    saver = BackgroundSaver(disk=FullDisk(10) if rank == 1 else LOCAL_DISK)
    saver.save(root, 1, {f"w{rank}": torch.zeros(100)}, {})
    with pytest.raises(SaveFailed) as caught:
        saver.save(root, 2, {}, {})
    assert saver.close() is None
    return str(caught.value)


def test_training_goes_on_while_a_save_is_written(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, train_while_saving, str(tmp_path))


def test_a_failure_is_raised_by_the_next_call_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, fail_in_the_background, str(tmp_path))
    assert first == second
    assert "rank 1: No space left" in first
    assert list(tmp_path.iterdir()) == []


def test_one_process_saves_in_the_background(tmp_path: Path) -> None:
    saver = BackgroundSaver()
    tensor = torch.ones(3)
    saver.save(tmp_path, 1, {"x": tensor}, {})
    tensor.zero_()
    saved = saver.close()
    assert saved is not None
    load_checkpoint(saved.path, {"x": tensor})
    assert tensor.sum() == 3
