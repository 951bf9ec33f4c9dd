"""Faults 4 and 6: a damaged checkpoint and a full disk. One process; the disk is a tmpfs of
limited size.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from shardwright.checkpoint.integrity import verify_checkpoint
from shardwright.checkpoint.tensor_loading import find_newest_checkpoint
from shardwright.config import Recipe, load_recipe
from shardwright.errors import SaveFailed
from shardwright.telemetry.event_log import (
    CheckpointEvent,
    ResumeEvent,
    StepEvent,
    WarningEvent,
    read_events,
)
from shardwright.training.run import train
from tests.faults.conftest import STEPS, assert_same_end, read_final_state


@pytest.fixture(scope="module")
def undisturbed_here(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run without faults, in this process."""
    folder = tmp_path_factory.mktemp("undisturbed_here") / "run"
    train(load_recipe(recipe, [f"run.dir={folder}"]))
    return folder


def train_steps(recipe: Path, folder: Path, steps: int) -> None:
    """Train the first steps of the run, at the same constant learning rate as the whole."""
    train(
        load_recipe(
            recipe,
            [f"run.dir={folder}", f"training.max_steps={steps}", "training.schedule=constant"],
        )
    )


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def fill_with_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a byte flipped": flip_byte,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "deleted": Path.unlink,
    "zeros": fill_with_zeros,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_after_damage_to_a_shard_the_run_resumes_from_the_checkpoint_before(
    recipe: Path, tmp_path: Path, damage: str
) -> None:
    whole = tmp_path / "whole"
    train(load_recipe(recipe, [f"run.dir={whole}", "training.schedule=constant"]))
    train_steps(recipe, tmp_path / "run", 8)
    DAMAGE[damage](tmp_path / "run" / "checkpoints" / "step-00000008" / "shard-00000.safetensors")
    train(
        load_recipe(recipe, [f"run.dir={tmp_path / 'run'}", "training.schedule=constant"]),
        resume=True,
    )
    events = read_events(tmp_path / "run")
    assert [event.step for event in events.filter_by_type(ResumeEvent)] == [6]
    assert any(
        "fell back from step-00000008 to step-00000006" in event.message
        for event in events.filter_by_type(WarningEvent)
    )
    assert_same_end(tmp_path / "run", whole)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with space for one and a half checkpoints of this run."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def load_recipe_for_disk(recipe: Path, tmp_path: Path, disk: Path) -> Recipe:
    return load_recipe(
        recipe,
        [
            f"run.dir={tmp_path / 'run'}",
            f"checkpoint.dir={disk}/checkpoints",
            "checkpoint.keep_last=1",
        ],
    )


def test_a_full_disk_is_reported_and_loses_nothing(
    recipe: Path, undisturbed_here: Path, tmp_path: Path, small_disk: Path
) -> None:
    with pytest.raises(SaveFailed, match="No space left"):
        train(load_recipe_for_disk(recipe, tmp_path, small_disk))
    events = read_events(tmp_path / "run")
    assert [event.step for event in events.filter_by_type(StepEvent)] == list(range(1, STEPS + 1))
    assert [event.step for event in events.filter_by_type(CheckpointEvent)] == [2]
    warnings = [
        event.message
        for event in events.filter_by_type(WarningEvent)
        if "No space left" in event.message
    ]
    assert len(warnings) == 4  # steps 4 to 10; the last failed save ended the run
    assert verify_checkpoint(small_disk / "checkpoints" / "step-00000002")[1] == []
    assert sorted(path.name for path in (small_disk / "checkpoints").iterdir()) == [
        "generation",
        "latest",
        "step-00000002",
    ]

    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    train(load_recipe_for_disk(recipe, tmp_path, small_disk), resume=True)
    newest = find_newest_checkpoint(small_disk / "checkpoints")
    assert newest is not None
    assert (newest.step, newest.refused) == (STEPS, ())
    (tmp_path / "run" / "checkpoints").symlink_to(small_disk / "checkpoints")
    tensors = read_final_state(tmp_path / "run")
    expected = read_final_state(undisturbed_here)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
