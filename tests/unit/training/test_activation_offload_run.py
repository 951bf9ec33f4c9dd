"""Runs whose saved tensors are on disk: a disk that is full at any write."""

from __future__ import annotations

import errno
import shutil
from functools import partial
from pathlib import Path

import pytest

from shardwright.offload.activation_store import ScratchStore
from shardwright.training.run import train
from tests.unit.training.test_offload_run import resume_after_failure
from tests.unit.training.test_trained_offload_run import build_run

DISK = {"activations": "disk"}
NUM_GROUPS = 8
"""Tests that share the writes of a run."""


def resume_full_disks(folder: Path, monkeypatch: pytest.MonkeyPatch, numbers: range) -> int:
    """Fill the disk at these writes of a run, resume each; return how many there are."""
    train(build_run(folder, "whole", {}, max_steps=2))
    build = partial(build_run, offload=DISK, max_steps=2)
    num_failed = 0
    for number in numbers:
        if not resume_after_failure(folder, monkeypatch, number, errno.ENOSPC, build, ScratchStore):
            break
        shutil.rmtree(folder / f"run-{number}")
        num_failed += 1
    return num_failed


def test_a_disk_that_is_full_at_a_write_ends_the_run_with_one_error_and_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first reservation, a write of the first step, and one of the second."""
    assert resume_full_disks(tmp_path, monkeypatch, range(0, 100, 45)) == 3


@pytest.mark.long
@pytest.mark.parametrize("first", range(NUM_GROUPS))
def test_a_disk_that_is_full_at_any_write_ends_the_run_with_one_error_and_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    numbers = range(first, 10_000, NUM_GROUPS)
    assert resume_full_disks(tmp_path, monkeypatch, numbers) > 10
