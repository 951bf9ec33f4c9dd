"""A save that fails on one rank fails on all and leaves no trace; a load that does not fit
changes no tensor.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwright.checkpoint.disk import LOCAL_DISK, Disk
from shardwright.checkpoint.tensor_loading import find_newest_checkpoint, load_checkpoint
from shardwright.checkpoint.tensor_saving import save_checkpoint
from shardwright.errors import CheckpointError, RankFailed, SaveFailed
from tests.multiprocess.pool import RankPool


class FullDisk(Disk):
    """Disk without space after `space_bytes`."""

    def __init__(self, space_bytes: int) -> None:
        self.space_bytes = space_bytes

    def write(self, descriptor: int, data: memoryview) -> None:
        self.space_bytes -= len(data)
        if self.space_bytes < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(descriptor, data)


class KillingDisk(Disk):
    """Disk that kills the process at its first sync of a file."""

    def sync(self, descriptor: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def build_tensors(step: int, rank: int) -> dict[str, torch.Tensor]:
    return {
        f"stage{rank}.w": torch.full((64, 8), float(step)),
        "shared": torch.full((9,), float(step)),
    }


def save_with_faults(root: str) -> list[str]:
    """Save, fail in several ways on one rank, save again; return the messages of the failures."""
    rank = dist.get_rank()
    save_checkpoint(root, 1, build_tensors(1, rank), {})
    attempts = {
        "full in the shard, rank 1": (
            build_tensors(2, rank),
            {},
            2,
            FullDisk(100) if rank == 1 else LOCAL_DISK,
        ),
        "full in the shard, rank 0": (
            build_tensors(2, rank),
            {},
            2,
            FullDisk(100) if rank == 0 else LOCAL_DISK,
        ),
        "full in the manifest": (
            build_tensors(2, rank),
            {},
            2,
            FullDisk(2700) if rank == 0 else LOCAL_DISK,
        ),
        "no tensor": ({"x": 3} if rank == 1 else {}, {}, 2, LOCAL_DISK),
        "dtype": (
            {"x": torch.zeros(2, dtype=torch.complex128)} if rank == 1 else {},
            {},
            2,
            LOCAL_DISK,
        ),
        "value": ({}, {"loss": float("nan") if rank == 1 else 0.0}, 2, LOCAL_DISK),
        "shape": ({"x": torch.zeros(2 + rank)}, {}, 2, LOCAL_DISK),
        "step": (build_tensors(2, rank), {}, 2 + rank, LOCAL_DISK),
    }
    messages = []
    for name, (tensors, values, step, disk) in attempts.items():
        try:
            save_checkpoint(root, step, tensors, values, disk=disk)  # type: ignore[arg-type]
        except SaveFailed as failed:
            messages.append(f"{name}: {failed}")
        dist.barrier()
        assert sorted(os.listdir(root)) == ["latest", "step-00000001"], name
        dist.barrier()
    save_checkpoint(root, 2, build_tensors(2, rank), {})
    return messages


def test_a_failed_save_fails_on_all_ranks_and_leaves_nothing(
    ranks: RankPool, tmp_path: Path
) -> None:
    first, second = ranks.run(2, save_with_faults, str(tmp_path))
    assert first == second
    reasons = [
        "rank 1: No space left on device",
        "rank 0: No space left on device",
        "rank 0: No space left on device",
        "rank 1: x: not a tensor",
        "rank 1: x: this dtype cannot be stored",
        "rank 1: values.loss: JSON cannot represent this number",
        "disagree about x",
        "different steps",
    ]
    assert len(first) == len(reasons)
    for message, reason in zip(first, reasons, strict=True):
        assert reason in message
    found = find_newest_checkpoint(tmp_path)
    assert found is not None
    assert (found.step, found.refused) == (2, ())


def load_with_faults(root: str) -> list[str]:
    rank = dist.get_rank()
    good = build_tensors(0, rank)
    wrong: list[dict[str, torch.Tensor]] = [
        good if rank == 0 else {"shared": good["shared"]},
        good | ({"more": torch.zeros(1)} if rank == 1 else {}),
        good if rank == 0 else good | {"shared": torch.zeros(10)},
        good if rank == 0 else good | {"shared": torch.zeros(9, dtype=torch.float64)},
    ]
    messages = []
    for tensors in wrong:
        try:
            load_checkpoint(Path(root) / "step-00000001", tensors)
        except CheckpointError as error:
            messages.append(str(error))
        assert not any(tensor.any() for tensor in tensors.values())
    return messages


def save_once(root: str, step: int) -> None:
    save_checkpoint(root, step, build_tensors(step, dist.get_rank()), {"step": step})


def test_a_load_that_does_not_fit_is_refused_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, save_once, str(tmp_path), 1)
    first, second = ranks.run(2, load_with_faults, str(tmp_path))
    assert first == second
    reasons = [
        "surplus stage1.w",
        "missing more",
        "shape (9,) in the checkpoint, (10,) here",
        "is F32 in the checkpoint, F64 here",
    ]
    assert len(first) == len(reasons)
    for message, reason in zip(first, reasons, strict=True):
        assert reason in message


def fall_back(root: str) -> tuple[int, list[str], dict[str, int]]:
    rank = dist.get_rank()
    found = find_newest_checkpoint(root)
    assert found is not None
    tensors = build_tensors(0, rank)
    values = load_checkpoint(found, tensors)
    assert all(bool((tensor == found.step).all()) for tensor in tensors.values())
    return found.step, [str(refused) for refused in found.refused], values


def test_all_ranks_fall_back_to_the_same_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        ranks.run(2, save_once, str(tmp_path), step)
    (tmp_path / "step-00000003" / "shard-00001.safetensors").write_bytes(b"x")
    shutil.rmtree(tmp_path / "step-00000002")
    first, second = ranks.run(2, fall_back, str(tmp_path))
    assert first == second
    assert first[0] == 1
    assert first[2] == {"step": 1}
    assert "shard-00001.safetensors has 1 bytes" in first[1][0]


def die_in_a_save(root: str, dying: int) -> None:
    rank = dist.get_rank()
    save_checkpoint(
        root, 2, build_tensors(2, rank), {}, disk=KillingDisk() if rank == dying else LOCAL_DISK
    )


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_dies_in_a_save_leaves_the_old_checkpoint(
    ranks: RankPool, tmp_path: Path, dying: int
) -> None:
    ranks.run(2, save_once, str(tmp_path), 1)
    with (
        RankPool() as pool,
        pytest.raises(RankFailed, match=f"rank {dying} of 2 was killed by SIGKILL"),
    ):
        pool.run(2, die_in_a_save, str(tmp_path), dying)
    assert ranks.run(2, fall_back, str(tmp_path))[0][0] == 1
    ranks.run(2, save_once, str(tmp_path), 2)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001", "step-00000002"]
