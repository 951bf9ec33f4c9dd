"""`make demo`: a language model learns Python from this machine's own standard library.

It measures a few steps, prints how long the demo will take here, and shortens it if that is too
long. Then it trains in two processes under ZeRO-3, is stopped as by Ctrl-C, resumes from its
checkpoint, generates a few lines of code, and draws its report. It runs `shardwright` commands
only, and prints each of them first.
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
from shardwright.telemetry.event_log import (
    EvaluationEvent,
    StepEvent,
    read_events,
    select_surviving,
)

RECIPE = Path(__file__).with_name("demo.yaml")
PROMPT = "def read_"

BUDGET_SECONDS = 250.0
"""Longest predicted demo: five minutes, less a margin for a machine that becomes slower."""
NUM_EVALUATIONS = 8
MIN_STEPS = 64
"""With fewer steps the validation loss would hardly decrease."""
_MEASURED_STEPS = 12
_MIN_FREE_SHARE = 0.9
"""Below this share of free cores the time without other processes is printed too."""
_WARM_STEPS = 2
"""Steps that are not measured, because libraries choose kernels and memory grows."""
_NUM_RANKS = 2
_LATER_STARTS = 3
"""Later commands: train and train --resume; generate and report together take less than another
one."""

_SIGNAL_ON_PARENT_DEATH = 1
"""PR_SET_PDEATHSIG of prctl(2); exec does not reset it."""


@dataclass(frozen=True)
class Pace:
    """Speed of this machine in seconds, measured after the data was tokenised."""

    start: float
    """Seconds of a command before its first step and after its last one."""
    step: float
    """Seconds per optimizer step."""
    evaluation: float
    """Seconds per evaluation."""
    busy_cores: float = 0.0
    """Cores that other processes used at the same time."""
    num_cores: int = _NUM_RANKS

    @property
    def free_share(self) -> float:
        """Share of the cores of two ranks that other processes left."""
        return min(1.0, max(0.0, self.num_cores - self.busy_cores) / _NUM_RANKS)

    def predict_seconds(self, num_steps: int) -> float:
        """Predict the seconds from now to the end of a demo of `num_steps` steps, if other
        processes use as much of the machine as now."""
        overhead = _LATER_STARTS * self.start + NUM_EVALUATIONS * self.evaluation
        return overhead + num_steps * self.step


@dataclass(frozen=True)
class RunLength:
    """Length of the run, and the settings that scale with it."""

    num_steps: int

    @property
    def stop_step(self) -> int:
        """Step at which the run is stopped once, between two checkpoints."""
        return max(1, 5 * self.num_steps // 16)

    def settings(self) -> list[str]:
        """Return the recipe's intervals in the form of `--set`."""
        intervals = {
            "training.max_steps": self.num_steps,
            "training.warmup_steps": self.num_steps // 20,
            "evaluation.every_steps": max(1, self.num_steps // NUM_EVALUATIONS),
            "checkpoint.every_steps": max(1, self.num_steps // 4),
            "run.log_every_steps": max(1, self.num_steps // 40),
        }
        return [f"{key}={value}" for key, value in intervals.items()]


def choose_run_length(pace: Pace, max_steps: int, remaining_seconds: float) -> RunLength:
    """Choose the longest run of at most `max_steps` that fits into the time left.

    The number of steps is a multiple of 16, so that all intervals are whole numbers, and at
    least `MIN_STEPS`.
    """
    if pace.predict_seconds(max_steps) <= remaining_seconds:
        return RunLength(max_steps)
    fitting = int((remaining_seconds - pace.predict_seconds(0)) / pace.step)
    return RunLength(min(max_steps, max(MIN_STEPS, fitting // 16 * 16)))


def describe_run_length(run_length: RunLength, pace: Pace, max_steps: int) -> str:
    """Describe how long the demo will take and, if it is shortened, by how much and why."""
    seconds = pace.predict_seconds(run_length.num_steps)
    text = f"a step takes {pace.step:.2f} s here: {run_length.num_steps} steps and everything else "
    text += f"take about {_format_minutes(seconds)}"
    if pace.free_share < _MIN_FREE_SHARE:
        text += (
            f", or {_format_minutes(seconds * pace.free_share)} without other processes, which use "
            f"{pace.busy_cores:.1f} of {pace.num_cores} cores"
        )
    if run_length.num_steps < max_steps:
        text = (
            f"shortened from {max_steps} to {run_length.num_steps} steps, because {text}, "
            f"and {max_steps} steps would take about "
            f"{_format_minutes(pace.predict_seconds(max_steps))}"
        )
    return text


def _format_minutes(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds:02d} s"


def main() -> int:
    """Run the demo; return an exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=Path("runs/demo"),
        help="run folder; an earlier demo there is removed",
    )
    parser.add_argument("--steps", type=int, help="maximum number of steps; default: the recipe's")
    parser.add_argument(
        "--seconds", type=float, default=BUDGET_SECONDS, help="time limit of the demo, in seconds"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a recipe key; passed on to train",
    )
    options = parser.parse_args()
    start_seconds = time.monotonic()
    if "MAKELEVEL" in os.environ:  # make waits for this process; a shell may exit before
        end_with_parent()
    os.environ["PYTHON_STDLIB"] = sysconfig.get_path("stdlib")
    os.environ["PYTHONWARNINGS"] = "ignore"
    run_dir: Path = options.run_dir
    shutil.rmtree(run_dir, ignore_errors=True)
    max_steps = options.steps or load_recipe(RECIPE, options.set).training.max_steps
    assert max_steps is not None, "the recipe sets max_steps"

    print_heading("1. Read and tokenise the standard library's source")
    if code := run_command(
        ["data", str(RECIPE), "--nproc", "2", "--samples", "1", *build_set_options(options.set)]
    ):
        return fail(f"data exited with code {code}")
    print_heading("2. Measure a few steps")
    pace = measure_pace(run_dir.with_name(f"{run_dir.name}-pace"), options.set)
    if pace is None:
        return fail("the measured steps failed")
    spent_seconds = time.monotonic() - start_seconds
    run_length = choose_run_length(pace, max_steps, options.seconds - spent_seconds)
    remaining_seconds = pace.predict_seconds(run_length.num_steps)
    predicted = f"{spent_seconds + remaining_seconds:.0f} s"
    if pace.free_share < _MIN_FREE_SHARE:
        predicted = f"{spent_seconds + remaining_seconds * pace.free_share:.0f} to {predicted}"
    print_heading(describe_run_length(run_length, pace, max_steps))
    train = [
        *build_train_command(run_dir),
        *build_set_options([*options.set, *run_length.settings()]),
    ]

    print_heading(f"3. Train, and press Ctrl-C at step {run_length.stop_step}")
    code = run_and_stop(train, run_dir, run_length.stop_step)
    if code != ExitCode.PREEMPTED:
        return fail(f"the stopped run exited with code {code}, not {int(ExitCode.PREEMPTED)}")
    print_heading("4. Resume from the checkpoint")
    if code := run_command([*train, "--resume"]):
        return fail(f"the resumed run exited with code {code}")
    print_heading("5. Generate some code")
    if code := run_command(
        [
            "generate",
            str(run_dir),
            "--prompt",
            PROMPT,
            "--max-new-tokens",
            "120",
            "--temperature",
            "0.7",
        ]
    ):
        return fail(f"generate exited with code {code}")
    print_heading("6. Draw the report")
    if code := run_command(["report", str(run_dir)]):
        return fail(f"report exited with code {code}")
    return check_run(run_dir, time.monotonic() - start_seconds, predicted)


def build_train_command(run_dir: Path) -> list[str]:
    """Return the arguments of `train` that all runs share."""
    return ["train", str(RECIPE), "--nproc", "2", "--run-dir", str(run_dir)]


def build_set_options(settings: list[str]) -> list[str]:
    """Turn settings into `--set` options of a command."""
    return [word for setting in settings for word in ("--set", setting)]


def measure_pace(run_dir: Path, settings: list[str]) -> Pace | None:
    """Train a few steps in a temporary folder and evaluate once; return None if that fails."""
    shutil.rmtree(run_dir, ignore_errors=True)
    overrides = [f"training.max_steps={_MEASURED_STEPS}", "training.warmup_steps=0"]
    overrides.append("evaluation.every_steps=null")
    busy_seconds = read_other_seconds()
    start_seconds = time.monotonic()
    if run_command([*build_train_command(run_dir), *build_set_options([*settings, *overrides])]):
        return None
    whole_seconds = time.monotonic() - start_seconds
    busy_cores = max(0.0, read_other_seconds() - busy_seconds) / whole_seconds
    events = read_events(run_dir)
    steps = [event.step_seconds for event in events.filter_by_type(StepEvent)]
    evaluation = sum(event.seconds for event in events.filter_by_type(EvaluationEvent))
    shutil.rmtree(run_dir)
    start = max(0.0, whole_seconds - sum(steps) - evaluation)
    num_cores = os.cpu_count() or _NUM_RANKS
    return Pace(start, median(steps[_WARM_STEPS:]), evaluation, busy_cores, num_cores)


def read_other_seconds() -> float:
    """Read the processor time of all processes but this one and its ended children since the
    machine started, in seconds; 0 where the kernel does not tell it."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    except OSError:
        return 0.0
    user, nice, system, _idle, _waiting, *interrupts = map(int, line.split()[1:8])
    total = (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
    return total - sum(os.times()[:4])


def end_with_parent() -> None:
    """Make Linux send SIGTERM to this process when its parent ends; no effect elsewhere.

    Otherwise a killed `make demo` would leave a training run behind.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_SIGNAL_ON_PARENT_DEATH, signal.SIGTERM)


def print_command(words: list[str]) -> list[str]:
    """Print a shardwright command and return its form for this interpreter."""
    print(f"$ shardwright {shlex.join(words)}", flush=True)
    return [sys.executable, "-m", "shardwright", *words]


def run_command(words: list[str]) -> int:
    """Run a command to its end; return its exit code."""
    return subprocess.run(print_command(words), check=False, preexec_fn=end_with_parent).returncode


def run_and_stop(words: list[str], run_dir: Path, stop_step: int) -> int:
    """Run a command and interrupt it after `stop_step` steps; return its exit code."""
    process = subprocess.Popen(
        print_command(words), start_new_session=True, preexec_fn=end_with_parent
    )
    try:
        while process.poll() is None:
            if count_logged_steps(run_dir) >= stop_step:
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


def count_logged_steps(run_dir: Path) -> int:
    """Return the number of optimizer steps that the run has logged so far."""
    if not (run_dir / "events.jsonl").is_file():
        return 0
    return max(
        (event.step or 0 for event in read_events(run_dir) if isinstance(event, StepEvent)),
        default=0,
    )


def check_run(run_dir: Path, seconds: float, predicted: str) -> int:
    """Check that the validation loss decreased and that no step was lost or repeated."""
    events = select_surviving(read_events(run_dir))
    losses = [(event.step, event.loss) for event in events if isinstance(event, EvaluationEvent)]
    steps = [event.step for event in events if isinstance(event, StepEvent)]
    curve = " -> ".join(f"{loss:.2f}" for _, loss in losses)
    print_heading(f"done in {seconds:.0f} s (predicted: {predicted}): validation loss {curve}")
    print(f"run folder: {run_dir}")
    if steps != list(range(1, len(steps) + 1)):
        return fail("steps were lost or repeated between the stopped and the resumed run")
    if len(losses) < 2 or losses[-1][1] >= losses[0][1]:
        return fail("the validation loss did not decrease")
    return 0


def print_heading(line: str) -> None:
    """Print a line that separates the parts of the demo."""
    print(f"\n=== {line}", flush=True)


def fail(reason: str) -> int:
    """Print why the demo failed; return exit code 1."""
    print(f"\ndemo failed: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
