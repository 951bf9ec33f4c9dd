"""Saving on a thread: the checkpoint has the values at the call of `save`; every rank reports a
failure.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.checkpoint.background_save import BackgroundSaver
from shardwright.checkpoint.disk import LOCAL_DISK, Disk
from shardwright.checkpoint.host_buffer import HostBuffer
from shardwright.checkpoint.local_tensors import HostCopy
from shardwright.checkpoint.tensor_loading import load_checkpoint
from shardwright.errors import SaveFailed
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_checkpoint_failures import FullDisk


class WaitingDisk(Disk):
    """Disk that writes nothing until the event is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def write(self, descriptor: int, data: memoryview) -> None:
        assert self.go.wait(250)
        super().write(descriptor, data)


def train_while_saving(root: str) -> None:
    rank = dist.get_rank()
    disk = WaitingDisk()
    saver = BackgroundSaver(disk=disk)
    weight = torch.full((8,), float(rank))
    shared = torch.arange(5.0)
    assert saver.save(root, 1, {f"w{rank}": weight, "shared": shared}, {"step": 1}) is None
    saver.wait_for_copy()
    for _ in range(3):  # collectives of training continue and its tensors change
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


def fail_in_background(root: str) -> str:
    rank = dist.get_rank()
    saver = BackgroundSaver(disk=FullDisk(10) if rank == 1 else LOCAL_DISK)
    saver.save(root, 1, {f"w{rank}": torch.zeros(100)}, {})
    with pytest.raises(SaveFailed) as caught:
        saver.save(root, 2, {}, {})
    assert saver.close() is None
    return str(caught.value)


def test_training_continues_while_a_save_is_written(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, train_while_saving, str(tmp_path))


def test_a_failure_is_raised_by_the_next_call_on_every_rank(
    ranks: RankPool, tmp_path: Path
) -> None:
    first, second = ranks.run(2, fail_in_background, str(tmp_path))
    assert first == second
    assert "rank 1: No space left" in first
    assert list(tmp_path.iterdir()) == []


def test_one_process_saves_in_the_background(tmp_path: Path) -> None:
    saver = BackgroundSaver()
    tensor = torch.ones(3)
    saver.save(tmp_path, 1, {"x": tensor}, {})
    saver.wait_for_copy()
    tensor.zero_()
    saved = saver.close()
    assert saved is not None
    load_checkpoint(saved.path, {"x": tensor})
    assert tensor.sum() == 3


@pytest.fixture
def copy_event(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Block copies until this event is set."""
    go = threading.Event()
    copy_tensors = HostBuffer.copy_tensors

    def wait(copy: HostBuffer, *arguments: Any, **options: Any) -> list[HostCopy]:
        assert go.wait(250)
        return copy_tensors(copy, *arguments, **options)

    monkeypatch.setattr(HostBuffer, "copy_tensors", wait)
    return go


def test_the_copy_overlaps_with_training(tmp_path: Path, copy_event: threading.Event) -> None:
    saver = BackgroundSaver()
    tensor = torch.ones(3)
    saver.save(tmp_path, 1, {"x": tensor}, {})  # returns before the copy
    waiting = threading.Thread(target=saver.wait_for_copy)
    waiting.start()
    assert waiting.is_alive()
    copy_event.set()
    waiting.join()
    tensor.zero_()
    saved = saver.close()
    assert saved is not None
    load_checkpoint(saved.path, {"x": tensor})
    assert tensor.sum() == 3


def test_a_tensor_that_changes_before_it_is_copied_fails_the_save(
    tmp_path: Path, copy_event: threading.Event
) -> None:
    saver = BackgroundSaver()
    tensor = torch.ones(3)
    saver.save(tmp_path, 1, {"x": tensor}, {})
    tensor.add_(1)
    copy_event.set()
    with pytest.raises(SaveFailed, match="changed while it was copied"):
        saver.close()
    assert list(tmp_path.iterdir()) == []


def save_changing_tensors(root: str) -> list[str]:
    """Save three times, then with values that differ between ranks.

    The second save has the tensors of the first; the third has another shape on one rank.
    """
    rank = dist.get_rank()
    saver = BackgroundSaver()
    for step, size in ((1, 4), (2, 4), (3, 4 + 2 * rank)):
        merged = {"counts": {f"w{rank}": step, "shared": 9}}
        tensors = {f"w{rank}": torch.full((size,), float(step)), "shared": torch.full((3,), step)}
        saver.save(root, step, tensors, {"step": step}, merged_values=merged)
        saver.wait()
        read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        values = load_checkpoint(f"{root}/step-{step:08d}", read)
        assert values == {"step": step, "counts": {"w0": step, "w1": step, "shared": 9}}
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(SaveFailed) as caught:
        saver.save_and_wait(root, 4, {}, {}, merged_values={"counts": {"shared": rank}})
    saver.close()
    return [str(caught.value), *sorted(path.name for path in Path(root).iterdir())]


def test_writers_are_assigned_again_when_tensors_change_and_values_are_merged(
    ranks: RankPool, tmp_path: Path
) -> None:
    first, second = ranks.run(2, save_changing_tensors, str(tmp_path))
    assert first == second
    assert first[0] == "ranks disagree about values.counts.shared: 0, on rank 1 1"
    assert first[1:] == ["latest", "step-00000001", "step-00000002", "step-00000003"]
