"""`make demo`: a language model learns Python from this machine's own standard library.

It measures a few steps, says how long the demo will take here, and shortens it if that is too long.
Then it trains in two processes under ZeRO-3, is stopped on the way as Ctrl-C would stop it, resumes from
its checkpoint, writes a few lines of code, and draws its report. Everything it runs is a `shardwright`
command that is printed first.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from shardwright.config import load_recipe
from shardwright.errors import ExitCode
from shardwright.telemetry.events import Evaluation, Step, read_events, surviving

RECIPE = Path(__file__).with_name("demo.yaml")
PROMPT = "def read_"

BUDGET_SECONDS = 250.0
"""The longest demo that is foretold: five minutes, less what a machine may turn slower meanwhile."""
NUM_EVALUATIONS = 8
FEWEST_STEPS = 64
"""With fewer the validation loss would hardly fall."""
_MEASURED_STEPS = 12
_WARM_STEPS = 2
"""Steps that are left out: libraries choose kernels, memory grows."""
_LATER_STARTS = 4
"""train, train --resume, generate, report."""

_ON_PARENTS_DEATH = 1
"""PR_SET_PDEATHSIG of prctl(2); it stays over an exec."""


@dataclass(frozen=True)
class Pace:
    """How fast this machine is, in seconds, measured with the data already tokenised."""

    start: float
    """Of a command, until its first step and after its last."""
    step: float
    evaluation: float

    def demo_seconds(self, num_steps: int) -> float:
        """From now to the end of a demo of so many steps."""
        around = _LATER_STARTS * self.start + NUM_EVALUATIONS * self.evaluation
        return around + num_steps * self.step


@dataclass(frozen=True)
class Course:
    """The run's length, and all that scales with it."""

    num_steps: int

    @property
    def stop_at(self) -> int:
        """The step at which the run is stopped once: between two checkpoints."""
        return max(1, 5 * self.num_steps // 16)

    def settings(self) -> list[str]:
        """Of the recipe, as `--set` takes them."""
        intervals = {
            "training.max_steps": self.num_steps,
            "training.warmup_steps": self.num_steps // 20,
            "evaluation.every_steps": max(1, self.num_steps // NUM_EVALUATIONS),
            "checkpoint.every_steps": max(1, self.num_steps // 4),
            "run.log_every_steps": max(1, self.num_steps // 40),
        }
        return [f"{key}={value}" for key, value in intervals.items()]


def choose_course(pace: Pace, most_steps: int, left_seconds: float) -> Course:
    """Choose the longest course of at most `most_steps` that fits into the time left.

    Counts of steps are multiples of 16, so that all intervals are whole, and at least `FEWEST_STEPS`.
    """
    if pace.demo_seconds(most_steps) <= left_seconds:
        return Course(most_steps)
    fitting = int((left_seconds - pace.demo_seconds(0)) / pace.step)
    return Course(min(most_steps, max(FEWEST_STEPS, fitting // 16 * 16)))


def describe_course(course: Course, pace: Pace, most_steps: int) -> str:
    """How long the demo takes from here, and if it is shortened, by how much and why."""
    told = f"a step takes {pace.step:.2f} s here: {course.num_steps} steps and all else "
    told += f"about {_minutes(pace, course.num_steps)}"
    if course.num_steps < most_steps:
        told = (
            f"shortened from {most_steps} to {course.num_steps} steps, because {told}, "
            f"and {most_steps} steps would take about {_minutes(pace, most_steps)}"
        )
    return told


def _minutes(pace: Pace, num_steps: int) -> str:
    minutes, seconds = divmod(round(pace.demo_seconds(num_steps)), 60)
    return f"{minutes} min {seconds:02d} s"


def main() -> int:
    """Run the demo; returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs/demo"), help="where the run goes; a former demo there is removed"
    )
    parser.add_argument("--steps", type=int, help="most steps to train; default the recipe's")
    parser.add_argument("--seconds", type=float, default=BUDGET_SECONDS, help="what the demo may take as it starts")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed to train")
    options = parser.parse_args()
    began = time.monotonic()
    if "MAKELEVEL" in os.environ:  # make stays until this ends; a shell may leave before
        end_with_parent()
    os.environ["PYTHON_STDLIB"] = sysconfig.get_path("stdlib")
    os.environ["PYTHONWARNINGS"] = "ignore"
    run_dir: Path = options.run_dir
    shutil.rmtree(run_dir, ignore_errors=True)
    most_steps = options.steps or load_recipe(RECIPE, options.set).training.max_steps
    assert most_steps is not None, "the recipe counts its steps"

    say("1. Read and tokenise the standard library's source")
    if code := call(["data", str(RECIPE), "--nproc", "2", "--samples", "1", *set_options(options.set)]):
        return fail(f"data left with {code}")
    say("2. Measure a few steps")
    pace = measure_pace(run_dir.with_name(f"{run_dir.name}-pace"), options.set)
    if pace is None:
        return fail("the measured steps did not end well")
    spent_seconds = time.monotonic() - began
    course = choose_course(pace, most_steps, options.seconds - spent_seconds)
    foretold = spent_seconds + pace.demo_seconds(course.num_steps)
    say(describe_course(course, pace, most_steps))
    train = [*train_command(run_dir), *set_options([*options.set, *course.settings()])]

    say(f"3. Train, and press Ctrl-C at step {course.stop_at}")
    code = run_and_stop(train, run_dir, course.stop_at)
    if code != ExitCode.PREEMPTED:
        return fail(f"the stopped run left with {code}, not {int(ExitCode.PREEMPTED)}")
    say("4. Go on from the checkpoint")
    if code := call([*train, "--resume"]):
        return fail(f"the resumed run left with {code}")
    say("5. Write some code")
    if code := call(["generate", str(run_dir), "--prompt", PROMPT, "--max-new-tokens", "120", "--temperature", "0.7"]):
        return fail(f"generate left with {code}")
    say("6. Draw the report")
    if code := call(["report", str(run_dir)]):
        return fail(f"report left with {code}")
    return conclude(run_dir, time.monotonic() - began, foretold)


def train_command(run_dir: Path) -> list[str]:
    """The words of `train` that all runs share."""
    return ["train", str(RECIPE), "--nproc", "2", "--run-dir", str(run_dir)]


def set_options(settings: list[str]) -> list[str]:
    """Settings as options of a command."""
    return [word for setting in settings for word in ("--set", setting)]


def measure_pace(run_dir: Path, settings: list[str]) -> Pace | None:
    """Train a few steps in a folder that is removed again, evaluate once; None if that fails."""
    shutil.rmtree(run_dir, ignore_errors=True)
    few = [f"training.max_steps={_MEASURED_STEPS}", "training.warmup_steps=0"]
    few.append("evaluation.every_steps=null")
    began = time.monotonic()
    if call([*train_command(run_dir), *set_options([*settings, *few])]):
        return None
    whole_seconds = time.monotonic() - began
    events = read_events(run_dir)
    steps = [event.step_seconds for event in events.of(Step)]
    evaluation = sum(event.seconds for event in events.of(Evaluation))
    shutil.rmtree(run_dir)
    start = max(0.0, whole_seconds - sum(steps) - evaluation)
    return Pace(start, median(steps[_WARM_STEPS:]), evaluation)


def end_with_parent() -> None:
    """Have this process asked to stop (SIGTERM) when its parent ends, however that ends; Linux tells, elsewhere nothing happens.

    A `make demo` that is killed outright would otherwise leave a training behind that nobody sees.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_ON_PARENTS_DEATH, signal.SIGTERM)


def command(words: list[str]) -> list[str]:
    """Print a shardwright command as a person would type it; returns it as this interpreter runs it."""
    print(f"$ shardwright {shlex.join(words)}", flush=True)
    return [sys.executable, "-m", "shardwright", *words]


def call(words: list[str]) -> int:
    """Run a command to its end."""
    return subprocess.run(command(words), check=False, preexec_fn=end_with_parent).returncode


def run_and_stop(words: list[str], run_dir: Path, stop_at: int) -> int:
    """Run a command and interrupt it once it has done `stop_at` steps."""
    process = subprocess.Popen(command(words), start_new_session=True, preexec_fn=end_with_parent)
    try:
        while process.poll() is None:
            if steps_done(run_dir) >= stop_at:
                process.send_signal(signal.SIGINT)
                return process.wait(timeout=120)
            time.sleep(0.25)
        return process.returncode
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=120)
        raise
    finally:
        if process.poll() is None:
            process.kill()


def steps_done(run_dir: Path) -> int:
    """Optimizer steps that the run has logged so far."""
    if not (run_dir / "events.jsonl").is_file():
        return 0
    return max((event.step or 0 for event in read_events(run_dir) if isinstance(event, Step)), default=0)


def conclude(run_dir: Path, seconds: float, foretold_seconds: float) -> int:
    """Check what a demo must show: a validation loss that fell, no step lost or done twice."""
    events = surviving(read_events(run_dir))
    losses = [(event.step, event.loss) for event in events if isinstance(event, Evaluation)]
    steps = [event.step for event in events if isinstance(event, Step)]
    curve = " -> ".join(f"{loss:.2f}" for _, loss in losses)
    say(f"done in {seconds:.0f} s ({foretold_seconds:.0f} s were foretold): validation loss {curve}")
    print(f"run folder: {run_dir}")
    if steps != list(range(1, len(steps) + 1)):
        return fail("the steps of the stopped and the resumed run do not join")
    if len(losses) < 2 or losses[-1][1] >= losses[0][1]:
        return fail("the validation loss did not fall")
    return 0


def say(line: str) -> None:
    """A heading."""
    print(f"\n=== {line}", flush=True)


def fail(why: str) -> int:
    """Say why the demo is no success."""
    print(f"\ndemo failed: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
