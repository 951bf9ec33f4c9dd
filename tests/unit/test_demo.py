"""The demo fits its time or is shortened in sight, and what `make demo` starts ends with it, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from recipes.demo import FEWEST_STEPS, RECIPE, Course, Pace, choose_course, describe_course

from shardwright.config import load_recipe

PARENT = """
import subprocess, sys
from recipes.demo import end_with_parent
child = subprocess.Popen([sys.executable, "-c", CHILD], preexec_fn=end_with_parent)
child.wait()
"""

CHILD = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # kept until it is waited for
print("ready", flush=True)
signal.sigwait({signal.SIGTERM})
sys.exit("asked to stop")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells of a parent's death")
def test_a_child_is_asked_to_stop_when_its_parent_is_killed() -> None:
    program = PARENT.replace("CHILD", repr(CHILD))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        assert parent.stdout.readline() == "ready\n"
        parent.send_signal(signal.SIGKILL)
        # Both ends of the pipes close when the child, too, is gone.
        assert parent.stdout.read() == ""
        assert parent.stderr.read() == "asked to stop\n"


QUICK, SLOW, CRAWLING = (Pace(start=8.0, step=step, evaluation=2.0) for step in (0.2, 0.5, 45.0))


def test_a_quick_machine_runs_the_recipe_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    course = choose_course(QUICK, 800, 250.0)
    monkeypatch.setenv("PYTHON_STDLIB", "unread")
    assert load_recipe(RECIPE, course.settings()) == load_recipe(RECIPE)
    assert course.stop_at == 250
    told = describe_course(course, QUICK, 800)
    assert "800 steps and all else about 3 min 28 s" in told
    assert "shortened" not in told


def test_a_slow_machine_shortens_the_demo_and_says_from_how_many_steps_to_how_many_and_why() -> None:
    course = choose_course(SLOW, 800, 200.0)
    assert FEWEST_STEPS < course.num_steps < 800
    assert SLOW.demo_seconds(course.num_steps) <= 200.0 < SLOW.demo_seconds(course.num_steps + 16)
    told = describe_course(course, SLOW, 800)
    assert f"shortened from 800 to {course.num_steps} steps, because a step takes 0.50 s here" in told
    assert "800 steps would take about 7 min 28 s" in told


def test_a_demo_is_never_too_short_for_its_loss_to_fall_and_promises_no_five_minutes_then() -> None:
    course = choose_course(CRAWLING, 800, 250.0)
    assert course.num_steps == FEWEST_STEPS
    assert f"{FEWEST_STEPS} steps and all else about 48 min 48 s" in describe_course(course, CRAWLING, 800)
    assert choose_course(CRAWLING, 32, 250.0).num_steps == 32


@pytest.mark.parametrize("num_steps", [32, 64, 176, 800])
def test_intervals_scale_with_the_run(num_steps: int) -> None:
    found = dict(setting.split("=") for setting in Course(num_steps).settings())
    assert int(found["evaluation.every_steps"]) * 8 == num_steps
    assert int(found["checkpoint.every_steps"]) * 4 == num_steps
    assert int(found["checkpoint.every_steps"]) < Course(num_steps).stop_at < 2 * int(found["checkpoint.every_steps"])
    assert 0 < int(found["training.warmup_steps"]) <= num_steps // 20
