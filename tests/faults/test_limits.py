"""Faults 3, 14 and 15: a rank that is slow, one that finds no more memory, a clock that jumps, two processes of one rank."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwright.errors import ExitCode
from shardwright.telemetry.events import Step, Warned, read_events
from tests.faults.conftest import ROOT, Run, assert_same_end


@pytest.mark.long
@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2,zero_stage=3"])
def test_a_slow_rank_is_named_within_the_steps_that_the_recipe_says(run: Run, tmp_path: Path, layout: str) -> None:
    slow = {"rank": 1, "step": 20, "place": "slow", "signals": [], "seconds": 1.0}
    done = run("--layout", layout, "--set", "training.max_steps=48", "--set", "checkpoint.every_steps=null", faults=[slow])
    assert done.returncode == ExitCode.DONE, done.stderr
    named = [event for event in read_events(tmp_path / "run").of(Warned) if "is slow" in event.message]
    assert [event.message.partition(":")[0] for event in named] == ["rank 1 is slow"]
    assert named[0].step is not None
    assert 20 < named[0].step <= 20 + 20


@pytest.mark.long
def test_a_rank_without_memory_says_so_and_what_the_plan_had_predicted(run: Run, tmp_path: Path) -> None:
    want = {"rank": 1, "step": 5, "place": "memory", "signals": []}
    done = run("--set", "model.config.intermediate_size=60000", "--set", "model.config.hidden_size=96", faults=[want])
    assert done.returncode == ExitCode.RUN_FAILED
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "rank 1 ran out of memory" in told, done.stderr
    assert re.search(r"The plan predicted [\d.]+ \w+ of tensors on the fullest rank \(weights [\d.]+ \w+, ", told)
    assert "Timed out" not in told
    assert "Connection" not in told


@pytest.mark.long
def test_a_wall_clock_that_jumps_moves_nothing(run: Run, untroubled: Path, tmp_path: Path) -> None:
    """A day ahead on one rank: nobody is said to hang, and no time of a step is longer for it."""
    words = ["--set", "watchdog.floor_seconds=20"]
    done = run(*words, faults=[{"rank": rank, "step": 6, "place": "clock", "signals": []} for rank in range(2)])
    assert done.returncode == ExitCode.DONE, done.stderr
    assert not (tmp_path / "run" / "hangs").exists()
    steps = read_events(tmp_path / "run").of(Step)
    assert max(step.time for step in steps) - min(step.time for step in steps) > 80_000  # it did jump
    assert max(step.step_seconds for step in steps) < 100
    assert max(step.elapsed_seconds for step in steps) < 1000
    assert_same_end(tmp_path / "run", untroubled)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def start_rank(recipe: Path, folder: Path, port: int, rank: int, temporary: Path) -> subprocess.Popen[str]:
    """One rank as torchrun or srun starts it."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2", "TMPDIR": str(temporary),
    }  # fmt: skip
    command = [sys.executable, "-m", "shardwright", "train", str(recipe), "--run-dir", str(folder)]
    return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.mark.long
@pytest.mark.parametrize("one_machine", [True, False])
def test_a_second_process_of_a_rank_is_refused_and_harms_nobody(
    recipe: Path, untroubled: Path, tmp_path: Path, one_machine: bool
) -> None:
    """Found by the pulse on one machine, by the claim in the store on two (here: two folders for temporary files)."""
    port, folder = free_port(), tmp_path / "run"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    ranks = [start_rank(recipe, folder, port, 0, tmp_path / "one")]
    while not list((tmp_path / "one").glob("shardwright-*/rank-0.pulse")):
        assert ranks[0].poll() is None
        time.sleep(0.05)
    ranks.append(start_rank(recipe, folder, port, 1, tmp_path / "one"))
    while not list((tmp_path / "one").glob("shardwright-*/rank-1.pulse")):
        assert ranks[1].poll() is None
        time.sleep(0.05)
    double = start_rank(recipe, folder, port, 1, tmp_path / ("one" if one_machine else "two"))
    _, told = double.communicate(timeout=200)
    endings = [rank.communicate(timeout=200)[1] for rank in ranks]
    assert double.returncode == ExitCode.WRONG_INPUT, told
    assert ("two processes say they are rank 1" if one_machine else "rank 1 is taken") in told
    assert [rank.returncode for rank in ranks] == [ExitCode.DONE, ExitCode.DONE], endings
    assert_same_end(folder, untroubled)
