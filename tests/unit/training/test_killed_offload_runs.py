"""Runs that are killed at an operation of their scratch files: resumed, they end with the bits of
an undisturbed run.

`python -m tests.unit.training.test_killed_offload_runs KIND FOLDER NAME NUMBER` trains and kills
itself before the operation with this number.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoint.disk import Disk
from shardwright.config import Recipe
from shardwright.training.run import train
from tests import forked
from tests.unit.training import (
    test_activation_offload_run,
    test_offload_run,
    test_parameter_offload_run,
    test_trained_offload_run,
)
from tests.unit.training.test_offload_run import read_checkpoints

OPERATIONS = ("create_scratch", "reserve", "read_until_end", "write_at")
"""`read_at` calls `read_until_end`."""
NUM_GROUPS = 12
"""Tests that share the operations of a run."""
Build = Callable[..., Recipe]
COPIED = {"kind": "bf16", "working_weights": True}
KINDS: dict[str, tuple[Build, Build]] = {
    "states": (
        partial(test_offload_run.build_run, tier="none", every_steps=2),
        partial(test_offload_run.build_run, tier="disk", every_steps=2),
    ),
    "trained weights": (
        partial(test_trained_offload_run.build_run, offload={}, max_steps=2),
        partial(
            test_trained_offload_run.build_run, offload=test_trained_offload_run.DISK, max_steps=2
        ),
    ),
    "frozen weights": (
        partial(test_parameter_offload_run.build_run, offload={}, max_steps=2),
        partial(
            test_parameter_offload_run.build_run,
            offload=test_parameter_offload_run.DISK,
            max_steps=2,
        ),
    ),
    "activations": (
        partial(test_trained_offload_run.build_run, offload={}, max_steps=2),
        partial(
            test_trained_offload_run.build_run,
            offload=test_activation_offload_run.DISK,
            max_steps=2,
        ),
    ),
    "working weights": (
        partial(test_trained_offload_run.build_run, offload={}, max_steps=2, precision=COPIED),
        partial(
            test_trained_offload_run.build_run,
            offload=test_trained_offload_run.DISK,
            max_steps=2,
            precision=COPIED,
        ),
    ),
}
"""Recipes of a run that is resident, and of one that has scratch files, by what these hold."""


def resume_killed_runs(kind: str, folder: Path, numbers: Iterable[int]) -> int:
    """Kill runs at these operations, resume each, and compare its checkpoints with an undisturbed
    run's; return how many. Stop at a run that ends before the operation.
    """
    build_resident, build_offloaded = KINDS[kind]
    train(build_resident(folder, "whole"))
    expected = read_checkpoints(folder / "whole")
    num_killed = 0
    for number in numbers:
        name = f"run-{number}"
        command = [sys.executable, "-m", __name__, kind, str(folder), name]
        done = forked.run([*command, str(number)], capture_output=True, text=True, timeout=120)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        left = [path.name for path in (folder / name).glob("*") if path.is_file()]
        assert not any("scratch" in file for file in left)
        train(build_offloaded(folder, name), resume=True)
        assert read_checkpoints(folder / name) == expected, number
        shutil.rmtree(folder / name)
        num_killed += 1
    return num_killed


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("states", 25),
        ("trained weights", 150),
        ("frozen weights", 40),
        ("activations", 150),
        ("working weights", 150),
    ],
)
def test_a_run_killed_at_an_operation_resumes_with_the_same_bits(
    tmp_path: Path, kind: str, number: int
) -> None:
    assert resume_killed_runs(kind, tmp_path, [number]) == 1


@pytest.mark.long
@pytest.mark.timeout(900)  # some seventy processes one after another: 60 s alone on idle cores
@pytest.mark.parametrize("first", range(NUM_GROUPS))
@pytest.mark.parametrize("kind", KINDS)
def test_runs_killed_at_every_operation_resume_with_the_same_bits(
    tmp_path: Path, kind: str, first: int
) -> None:
    assert resume_killed_runs(kind, tmp_path, itertools.count(first, NUM_GROUPS)) > 1


def main() -> None:
    """Train, and kill this process."""
    kind, folder, name, number = sys.argv[1:]
    remaining = int(number)

    def count(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            nonlocal remaining
            remaining -= 1
            if remaining < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*arguments)

        return run

    for operation in OPERATIONS:
        setattr(Disk, operation, count(getattr(Disk, operation)))
    _, build_offloaded = KINDS[kind]
    train(build_offloaded(Path(folder), name))


if __name__ == "__main__":
    main()
