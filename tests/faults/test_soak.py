"""A run that loses many ranks ends with the weights of the run without faults."""

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
    ResumeEvent,
    RunStartedEvent,
    StepEvent,
    read_events,
    select_surviving_steps,
)
from tests import forked
from tests.faults.conftest import ROOT, assert_same_end, run_alone
from tests.faults.worker import MARKS, PLAN

STEPS_PER_KILL = 10
"""Steps of the whole run per kill: more than a generation runs before it is killed, so that all
kills happen.
"""
SHORT_KILLS = 3
"""Kills of the test outside the long suite, in forked processes."""
AT_START = 0.2
"""Share of the kills while ranks start: imports, rendezvous, reading the checkpoint."""


AT_START_SECONDS = {"cold": 4.0, "warm": 0.6, "memory": 0.6}
"""Longest time after the start of a generation at which these kills happen."""


class Progress:
    """Numbers of starts and steps in the events of a run, read incrementally."""

    def __init__(self, run: Path) -> None:
        self.path = run / "events.jsonl"
        self.position = 0
        self.starts = 0
        self.steps = 0

    def update(self) -> None:
        """Count the new events."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self.position)
                new = file.read()
            self.position += len(new)
            self.starts += new.count(b'"kind": "run_started"')
            self.steps += new.count(b'"kind": "step"')


def list_ranks(launcher: psutil.Process, known: set[int]) -> dict[int, psutil.Process]:
    """Return the rank processes that are not `known`, by process id."""
    ranks = {}
    for child in launcher.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just died
            if child.pid not in known and "tests.faults.worker" in child.cmdline():
                ranks[child.pid] = child
    return ranks


def list_assigned_ranks(
    launcher: psutil.Process, folder: Path, seen: set[Path]
) -> dict[int, psutil.Process]:
    """Return the processes that have ranks of a new generation, once it has two.

    Args:
        folder: Folder in which the launcher creates one of its own for each generation.
        seen: Folders of earlier generations; the new one is added.
    """
    for control in set(folder.glob("shardwright-*")) - seen:
        files = list(control.glob("rank-*.pid"))
        if len(files) == 2:
            seen.add(control)
            pids = {int(file.read_text()) for file in files}
            return {child.pid: child for child in launcher.children() if child.pid in pids}
    return {}


def kill_at_random(
    launcher: subprocess.Popen[bytes],
    run: Path,
    kills: int,
    generator: random.Random,
    kind: str,
    warm_folder: Path | None,
) -> list[float]:
    """Kill one rank of each generation, some at its start, some after a few steps.

    Return the seconds from each start of ranks to the next training step.

    Args:
        kind: kind of restart, a key of `AT_START_SECONDS`.
        warm_folder: folder for temporary files of a run with warm restarts, None for others.
    """
    progress = Progress(run)
    launcher_process = psutil.Process(launcher.pid)
    known = set[int]()
    seen = set[Path]()
    restart_seconds = list[float]()
    for _ in range(kills):
        while (
            len(
                ranks := list_ranks(launcher_process, known)
                if warm_folder is None
                else list_assigned_ranks(launcher_process, warm_folder, seen)
            )
            < 2
        ):
            assert launcher.poll() is None
            time.sleep(0.1 if warm_folder is None else 0.005)
        progress.update()
        starts = progress.starts
        num_steps = generator.randint(0, STEPS_PER_KILL - 2)
        started = time.monotonic()
        if generator.random() < AT_START:
            time.sleep(generator.uniform(0.0, AT_START_SECONDS[kind]))
        else:
            while progress.starts == starts:
                assert launcher.poll() is None
                time.sleep(0.01)
                progress.update()
            began = time.monotonic()
            steps = progress.steps
            while progress.steps < steps + num_steps and launcher.poll() is None:
                time.sleep(0.01)
                progress.update()
            restart_seconds.append(began - started)
            time.sleep(generator.uniform(0.0, 0.03))
        generator.choice(list(ranks.values())).kill()
        known |= set(ranks)
    return restart_seconds


@pytest.mark.parametrize(
    ("kills", "kind"),
    [
        (SHORT_KILLS, "warm"),
        pytest.param(2, "cold", marks=pytest.mark.long),
        pytest.param(50, "cold", marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
        pytest.param(50, "warm", marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
        pytest.param(50, "memory", marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
    ],
)
def test_kills_at_random_moments_cost_time_and_nothing_else(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kills: int, kind: str
) -> None:
    """Each kill comes at a random moment of a generation's life."""
    run = tmp_path / "run"
    is_warm = kind != "cold"
    is_short = kills == SHORT_KILLS
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
        f"checkpoint.every_steps={10 if kind == 'memory' else 1}",
        "--set",
        f"elastic.warm_restarts={str(is_warm).lower()}",
        "--set",
        f"elastic.peer_copies={int(kind == 'memory')}",
    ]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {"OMP_NUM_THREADS": "1", PLAN: json.dumps([]), MARKS: str(tmp_path)}
    environment["TMPDIR"] = str(temporary)
    command = [sys.executable, "-m", "tests.faults.run", str(recipe), *words, *length]
    began = time.monotonic()
    with (tmp_path / "errors").open("w") as errors:  # an unread pipe would fill up
        start = forked.Popen if is_short else subprocess.Popen
        process = start(command, cwd=ROOT, env=environment, stderr=errors)
    try:
        restart_seconds = kill_at_random(
            process, run, kills, random.Random(kills), kind, temporary if is_warm else None
        )
        assert process.wait(timeout=1800) == ExitCode.DONE, (tmp_path / "errors").read_text()[
            -4000:
        ]
    finally:
        process.kill()
        process.wait()
    seconds = time.monotonic() - began
    events = read_events(run)
    run_alone(recipe, tmp_path / "alone", *length, is_forked=is_short)
    assert_same_end(run, tmp_path / "alone", tmp_path, steps=steps)
    useful = sum(step.step_seconds for step in select_surviving_steps(events))
    num_generations = len(events.filter_by_type(RunStartedEvent))
    num_steps = len(events.filter_by_type(StepEvent))
    from_memory = sum(event.source == "memory" for event in events.filter_by_type(ResumeEvent))
    assert (from_memory > kills // 2) == (kind == "memory")
    with capsys.disabled():
        sys.stdout.write(
            f"\n{kills} kills ({kind}) in {seconds:.0f} s, "
            f"{num_generations} generations that trained: "
            f"{steps} of {num_steps} steps count; {from_memory} restarts from memory; "
            f"training continued {statistics.median(restart_seconds):.1f} s after "
            "ranks were started; "
            f"goodput {useful / seconds:.2%} of the time\n"
        )
