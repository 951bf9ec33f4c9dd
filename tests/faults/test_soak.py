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
from tests.faults.conftest import ROOT, STEPS, assert_same_end
from tests.faults.worker import MARKS, PLAN


def count_of(run: Path, kind: type[Step] | type[RunStarted]) -> int:
    return len(read_events(run).of(kind)) if (run / "events.jsonl").exists() else 0


def ranks_of(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children(recursive=True) if "tests.faults.worker" in child.cmdline()]


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_kills_at_random_moments_cost_time_and_nothing_else(recipe: Path, untroubled: Path, tmp_path: Path, kills: int) -> None:
    """Each kill comes a random moment after the ranks are at work, wherever they are then; half of them take no step in between."""
    chance, run = random.Random(kills), tmp_path / "run"
    words = ["--run-dir", str(run), "--nproc", "2", "--set", f"elastic.max_restarts={kills}", "--set", "checkpoint.every_steps=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", PLAN: json.dumps([]), MARKS: str(tmp_path)}
    command = [sys.executable, "-m", "tests.faults.run", str(recipe), *words]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
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
    _, told = process.communicate(timeout=600)
    assert process.returncode == ExitCode.DONE, told
    assert_same_end(run, untroubled)
    taken = count_of(run, Step)
    useful = sum(step.step_seconds for step in surviving_steps(read_events(run)))
    sys.stdout.write(
        f"{killed} kills, {count_of(run, RunStarted)} generations: {STEPS} of {taken} steps count, "
        f"goodput {useful / (time.monotonic() - began):.2%} of the time\n"
    )
    assert killed >= 1
