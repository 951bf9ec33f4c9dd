"""A run that loses a rank again and again ends with the weights of the run that was left alone."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from shardwright.errors import ExitCode
from shardwright.telemetry.event_log import (
    RunStartedEvent,
    StepEvent,
    read_events,
    select_surviving_steps,
)
from tests.faults.conftest import ROOT, assert_same_end, run_alone
from tests.faults.worker import MARKS, PLAN

STEPS_PER_KILL = 10
"""Of the whole run: more than a generation makes before it is killed, so that there are as many
kills as are asked for.
"""
AT_START = 0.2
"""Share of the kills that come while ranks start: imports, meeting the others, reading the
checkpoint.
"""


class Progress:
    """How many starts and steps the events of a run tell of, read on from where the last look
    ended.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / "events.jsonl"
        self.position = 0
        self.starts = 0
        self.steps = 0

    def look(self) -> None:
        """Count what is new."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self.position)
                new = file.read()
            self.position += len(new)
            self.starts += new.count(b'"kind": "run_started"')
            self.steps += new.count(b'"kind": "step"')


def ranks_of(launcher: psutil.Process) -> dict[int, psutil.Process]:
    """Processes of the generation that is there now, by their ids."""
    found = {}
    for child in launcher.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just died
            if "tests.faults.worker" in child.cmdline():
                found[child.pid] = child
    return found


def kill_at_random(
    launcher: subprocess.Popen[bytes], run: Path, kills: int, chance: random.Random
) -> list[float]:
    """Kill one rank of each generation, some at its start, some after a few steps; seconds from
    each kill to the next step.
    """
    progress = Progress(run)
    told = psutil.Process(launcher.pid)
    known = set[int]()
    came_back = list[float]()
    for _ in range(kills):
        while (
            len(ranks := {pid: rank for pid, rank in ranks_of(told).items() if pid not in known})
            < 2
        ):
            assert launcher.poll() is None
            time.sleep(0.1)
        progress.look()
        starts = progress.starts
        wanted = chance.randint(0, STEPS_PER_KILL - 2)
        killed = time.monotonic()
        if chance.random() < AT_START:
            time.sleep(chance.uniform(0.0, 4.0))
        else:
            while progress.starts == starts:
                assert launcher.poll() is None
                time.sleep(0.01)
                progress.look()
            began = time.monotonic()
            steps = progress.steps
            while progress.steps < steps + wanted and launcher.poll() is None:
                time.sleep(0.01)
                progress.look()
            came_back.append(began - killed)
            time.sleep(chance.uniform(0.0, 0.03))
        chance.choice(list(ranks.values())).kill()
        known |= set(ranks)
    return came_back


@pytest.mark.long
@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.timeout(7200))])
def test_kills_at_random_moments_cost_time_and_nothing_else(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kills: int
) -> None:
    """Each kill comes at a random moment of a generation's life, wherever its ranks are then."""
    run = tmp_path / "run"
    steps = STEPS_PER_KILL * kills
    length = ["--set", f"training.max_steps={steps}"]
    words = [
        "--run-dir",
        str(run),
        "--nproc",
        "2",
        "--set",
        f"elastic.max_restarts={kills}",
        "--set",
        "checkpoint.every_steps=1",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", PLAN: json.dumps([]), MARKS: str(tmp_path)}
    command = [sys.executable, "-m", "tests.faults.run", str(recipe), *words, *length]
    began = time.monotonic()
    with (tmp_path / "told").open("w") as told:  # a pipe that nobody reads would fill up
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=told)
    try:
        came_back = kill_at_random(process, run, kills, random.Random(kills))
        assert process.wait(timeout=1800) == ExitCode.DONE, (tmp_path / "told").read_text()[-4000:]
    finally:
        process.kill()
        process.wait()
    seconds = time.monotonic() - began
    events = read_events(run)
    run_alone(recipe, tmp_path / "alone", *length)
    assert_same_end(run, tmp_path / "alone", tmp_path, steps=steps)
    useful = sum(step.step_seconds for step in select_surviving_steps(events))
    with capsys.disabled():
        sys.stdout.write(
            f"\n{kills} kills in {seconds:.0f} s, {len(events.filter_by_type(RunStartedEvent))} generations that trained: {steps} of "
            f"{len(events.filter_by_type(StepEvent))} steps count; training went on {statistics.median(came_back):.1f} s after ranks were started; "
            f"goodput {useful / seconds:.2%} of the time\n"
        )
