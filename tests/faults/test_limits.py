"""Faults 3, 14 and 15: a slow rank, one without free memory, a clock that jumps, and two processes
of one rank.
"""

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
from shardwright.telemetry.event_log import StepEvent, WarningEvent, read_events
from tests.faults.conftest import ROOT, Run, assert_same_end

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2,zero_stage=3"])
def test_a_slow_rank_is_named_within_the_steps_of_the_recipe(
    run: Run, tmp_path: Path, layout: str
) -> None:
    slow = {"rank": 1, "step": 20, "place": "slow", "signals": [], "seconds": 1.0}
    done = run(
        "--layout",
        layout,
        "--set",
        "training.max_steps=48",
        "--set",
        "checkpoint.every_steps=null",
        faults=[slow],
    )
    assert done.returncode == ExitCode.DONE, done.stderr
    warnings = [
        event
        for event in read_events(tmp_path / "run").filter_by_type(WarningEvent)
        if "is slow" in event.message
    ]
    assert [event.message.partition(":")[0] for event in warnings] == ["rank 1 is slow"]
    assert warnings[0].step is not None
    assert 20 < warnings[0].step <= 20 + 20


@pytest.mark.long
def test_a_rank_without_memory_reports_it_with_the_prediction_of_the_plan(
    run: Run, tmp_path: Path
) -> None:
    fault = {"rank": 1, "step": 5, "place": "memory", "signals": []}
    done = run(
        "--set",
        "model.config.intermediate_size=60000",
        "--set",
        "model.config.hidden_size=96",
        faults=[fault],
    )
    assert done.returncode == ExitCode.RUN_FAILED
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "rank 1 ran out of memory" in message, done.stderr
    assert re.search(
        r"The plan predicted [\d.]+ \w+ of tensors on the fullest rank \(weights [\d.]+ \w+, ",
        message,
    )
    assert "Timed out" not in message
    assert "Connection" not in message


def test_a_jump_of_the_wall_clock_has_no_effect(
    run: Run, undisturbed: Path, tmp_path: Path
) -> None:
    """One day ahead on both ranks: no hang is reported, and no measured step takes longer."""
    options = ["--set", "watchdog.floor_seconds=20"]
    done = run(
        *options,
        faults=[{"rank": rank, "step": 6, "place": "clock", "signals": []} for rank in range(2)],
    )
    assert done.returncode == ExitCode.DONE, done.stderr
    assert not (tmp_path / "run" / "hangs").exists()
    steps = read_events(tmp_path / "run").filter_by_type(StepEvent)
    assert (
        max(step.time for step in steps) - min(step.time for step in steps) > 80_000
    )  # it did jump
    assert max(step.step_seconds for step in steps) < 100
    assert max(step.elapsed_seconds for step in steps) < 1000
    assert_same_end(tmp_path / "run", undisturbed)


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


WAITING_STEPS = """
import sys, time
from pathlib import Path
marks = Path(sys.argv.pop(1))
from shardwright.training import loop
step = loop.TrainingLoop._run_step
def wait_and_step(self):
    (marks / f"at-work-{self.context.rank_environment.rank}").touch()
    while not (marks / "go").exists():
        time.sleep(0.05)
    return step(self)
loop.TrainingLoop._run_step = wait_and_step
from shardwright.cli.main import main
main(["train", *sys.argv[1:]])
"""
"""No step runs before the file `go` exists, so ranks keep running for as long as a test needs
them.
"""


def start_rank(
    recipe: Path,
    folder: Path,
    port: int,
    rank: int,
    temporary_folder: Path,
    marks: Path,
    *words: str,
) -> subprocess.Popen[str]:
    """Start one rank as torchrun or srun does."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "TMPDIR": str(temporary_folder),
    }
    command = [
        sys.executable,
        "-c",
        WAITING_STEPS,
        str(marks),
        str(recipe),
        "--run-dir",
        str(folder),
    ]
    command += ["--set", "run.timeout_seconds=600", *words]
    return subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until_at_work(ranks: list[subprocess.Popen[str]], marks: Path) -> None:
    while not all((marks / f"at-work-{rank}").exists() for rank in range(len(ranks))):
        for process in ranks:
            assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank", "machine", "into", "expected"),
    [
        # Detected by the heartbeat.
        (1, "one", "run", "two processes have rank 1"),
        # By the claim in the store; here a machine is a folder for temporary files.
        (1, "two", "run", "rank 1 is taken"),
        # By the lock on the run folder, which the first rank holds.
        (0, "two", "run", "another process is writing"),
        # By the port, on which the store of the running run listens.
        (0, "two", "another run", "in use"),
    ],
)
def test_a_second_process_of_a_rank_is_refused_and_the_run_continues(
    recipe: Path,
    undisturbed: Path,
    tmp_path: Path,
    rank: int,
    machine: str,
    into: str,
    expected: str,
) -> None:
    """Without `--resume` every rank refuses a folder that has a run, before it looks for others."""
    port = find_free_port()
    folder = tmp_path / "run"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    ranks = [
        start_rank(recipe, folder, port, number, tmp_path / "one", tmp_path) for number in range(2)
    ]
    try:
        wait_until_at_work(ranks, tmp_path)
        words = ["--resume"] if into == "run" else []
        double = start_rank(
            recipe, tmp_path / into, port, rank, tmp_path / machine, tmp_path, *words
        )
        _, message = double.communicate(timeout=600)
        assert double.returncode == ExitCode.WRONG_INPUT, message
        assert expected in message
        (tmp_path / "go").touch()
        endings = [process.communicate(timeout=600)[1] for process in ranks]
        assert [process.returncode for process in ranks] == [ExitCode.DONE, ExitCode.DONE], endings
    finally:
        for process in ranks:
            with process:  # closes its pipe
                process.kill()
    assert_same_end(folder, undisturbed)
