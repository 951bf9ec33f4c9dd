"""The demo fits its time limit or reports that it is shortened; its processes end with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from recipes.demo import (
    MIN_STEPS,
    RECIPE,
    Pace,
    RunLength,
    choose_run_length,
    describe_run_length,
)

from shardwright.config import load_recipe

PARENT = """
import subprocess, sys
from recipes.demo import end_with_parent
child = subprocess.Popen([sys.executable, "-c", CHILD], preexec_fn=end_with_parent)
child.wait()
"""

CHILD = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # stays pending until sigwait
print("ready", flush=True)
signal.sigwait({signal.SIGTERM})
sys.exit("asked to stop")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the death of a parent")
def test_child_receives_sigterm_when_its_parent_is_killed() -> None:
    program = PARENT.replace("CHILD", repr(CHILD))
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        assert parent.stdout.readline() == "ready\n"
        parent.send_signal(signal.SIGKILL)
        # The pipes close once the child has exited too.
        assert parent.stdout.read() == ""
        assert parent.stderr.read() == "asked to stop\n"


QUICK, SLOW, CRAWLING = (Pace(start=8.0, step=step, evaluation=2.0) for step in (0.2, 0.5, 45.0))


def test_fast_machine_runs_the_recipe_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    run_length = choose_run_length(QUICK, 800, 250.0)
    monkeypatch.setenv("PYTHON_STDLIB", "unread")
    assert load_recipe(RECIPE, run_length.settings()) == load_recipe(RECIPE)
    assert run_length.stop_step == 250
    text = describe_run_length(run_length, QUICK, 800)
    assert "800 steps and everything else take about 3 min 20 s" in text
    assert "shortened" not in text


def test_slow_machine_shortens_the_demo_and_reports_why() -> None:
    run_length = choose_run_length(SLOW, 800, 200.0)
    assert MIN_STEPS < run_length.num_steps < 800
    assert (
        SLOW.predict_seconds(run_length.num_steps)
        <= 200.0
        < SLOW.predict_seconds(run_length.num_steps + 16)
    )
    text = describe_run_length(run_length, SLOW, 800)
    assert (
        f"shortened from 800 to {run_length.num_steps} steps, because a step takes 0.50 s here"
        in text
    )
    assert "800 steps would take about 7 min 20 s" in text


def test_a_busy_machine_has_a_second_prediction() -> None:
    busy = replace(QUICK, busy_cores=1.0)
    text = describe_run_length(RunLength(800), busy, 800)
    assert "take about 3 min 20 s, or 1 min 40 s without other processes" in text
    assert "which use 1.0 of 2 cores" in text
    assert replace(busy, num_cores=8).free_share == 1.0
    assert "other processes" not in describe_run_length(RunLength(800), QUICK, 800)


def test_very_slow_machine_runs_the_minimum_number_of_steps() -> None:
    run_length = choose_run_length(CRAWLING, 800, 250.0)
    assert run_length.num_steps == MIN_STEPS
    assert f"{MIN_STEPS} steps and everything else take about 48 min 40 s" in describe_run_length(
        run_length, CRAWLING, 800
    )
    assert choose_run_length(CRAWLING, 32, 250.0).num_steps == 32


@pytest.mark.parametrize("num_steps", [32, 64, 176, 800])
def test_intervals_scale_with_the_run(num_steps: int) -> None:
    settings = dict(setting.split("=") for setting in RunLength(num_steps).settings())
    assert int(settings["evaluation.every_steps"]) * 8 == num_steps
    assert int(settings["checkpoint.every_steps"]) * 4 == num_steps
    assert (
        int(settings["checkpoint.every_steps"])
        < RunLength(num_steps).stop_step
        < 2 * int(settings["checkpoint.every_steps"])
    )
    assert 0 < int(settings["training.warmup_steps"]) <= num_steps // 20
