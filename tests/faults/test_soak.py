"""A run that loses a rank again and again ends with the weights of the run that was left alone."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shardwright.errors import ExitCode
from shardwright.telemetry.events import RunStarted, Step, read_events, surviving_steps
from tests.faults.conftest import ROOT, assert_same_end, run_alone
from tests.faults.worker import MARKS, PLAN


def count_of(run: Path, kind: type[Step] | type[RunStarted]) -> int:
    return len(read_events(run).of(kind)) if (run / "events.jsonl").exists() else 0


def ranks_of(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children(recursive=True) if "tests.faults.worker" in child.cmdline()]


STEPS_PER_KILL = 8
"""Of the whole run: more than a generation makes before it is killed, so that there are as many kills as are asked for."""


@pytest.mark.long
@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.timeout(3600))])
def test_kills_at_random_moments_cost_time_and_nothing_else(recipe: Path, tmp_path: Path, kills: int) -> None:
    """Each kill comes a random moment after the ranks are at work, wherever they are then; half of them take no step in between."""
    chance, run, steps = random.Random(kills), tmp_path / "run", STEPS_PER_KILL * kills
    length = ["--set", f"training.max_steps={steps}"]
    words = ["--run-dir", str(run), "--nproc", "2", "--set", f"elastic.max_restarts={kills}", "--set", "checkpoint.every_steps=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", PLAN: json.dumps([]), MARKS: str(tmp_path)}
    command = [sys.executable, "-m", "tests.faults.run", str(recipe), *words, *length]
    with (tmp_path / "told").open("w") as told:  # a pipe that nobody reads would fill up
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=told)
    began, killed = time.monotonic(), 0
    while killed < kills and process.poll() is None:
        if count_of(run, RunStarted) <= killed:
            time.sleep(0.05)
            continue
        time.sleep(chance.uniform(0.0, 0.15))
        ranks = ranks_of(psutil.Process(process.pid))
        if ranks:
            chance.choice(ranks).kill()
            killed += 1
    process.wait(timeout=600)
    seconds = time.monotonic() - began
    assert process.returncode == ExitCode.DONE, (tmp_path / "told").read_text()[-4000:]
    assert killed == kills
    run_alone(recipe, tmp_path / "alone", *length)
    assert_same_end(run, tmp_path / "alone", tmp_path, steps=steps)
    useful = sum(step.step_seconds for step in surviving_steps(read_events(run)))
    sys.stdout.write(
        f"{killed} kills, {count_of(run, RunStarted)} generations: {steps} of {count_of(run, Step)} steps count, "
        f"goodput {useful / seconds:.2%} of the time\n"
    )
