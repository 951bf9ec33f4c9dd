"""`make demo`: watch a language model learn Python from this machine's own standard library, in two processes under ZeRO-3.

It trains, is stopped on the way as Ctrl-C would stop it, resumes from its checkpoint, writes a few lines of code, proves its
gradients against one process, and draws its report. Everything it runs is a `shardwright` command that is printed first.
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
from pathlib import Path

from shardwright.errors import ExitCode
from shardwright.telemetry.events import Evaluation, Step, read_events, surviving

RECIPE = Path(__file__).with_name("demo.yaml")
PROMPT = "def read_"

_ON_PARENTS_DEATH = 1
"""PR_SET_PDEATHSIG of prctl(2); it stays over an exec."""


def main() -> int:
    """Run the demo; returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--run-dir", type=Path, default=Path("runs/demo"), help="where the run goes; a former demo there is removed"
    )
    parser.add_argument("--stop-at", type=int, default=250, help="step after which the run is stopped once")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed to train")
    options = parser.parse_args()
    began = time.monotonic()
    if "MAKELEVEL" in os.environ:  # make stays until this ends; a shell may leave before
        end_with_parent()
    os.environ["PYTHON_STDLIB"] = sysconfig.get_path("stdlib")
    os.environ["PYTHONWARNINGS"] = "ignore"
    run_dir: Path = options.run_dir
    shutil.rmtree(run_dir, ignore_errors=True)
    changes = [word for change in options.set for word in ("--set", change)]
    train = ["train", str(RECIPE), "--nproc", "2", "--run-dir", str(run_dir), *changes]

    say(f"1. Train on the standard library's source, and press Ctrl-C at step {options.stop_at}")
    code = run_and_stop(train, run_dir, options.stop_at)
    if code != ExitCode.PREEMPTED:
        return fail(f"the stopped run left with {code}, not {int(ExitCode.PREEMPTED)}")
    say("2. Go on from the checkpoint")
    if code := call([*train, "--resume"]):
        return fail(f"the resumed run left with {code}")
    say("3. Write some code")
    if code := call(["generate", str(run_dir), "--prompt", PROMPT, "--max-new-tokens", "120", "--temperature", "0.7"]):
        return fail(f"generate left with {code}")
    say("4. Draw the report")
    if code := call(["report", str(run_dir)]):
        return fail(f"report left with {code}")
    return conclude(run_dir, time.monotonic() - began)


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
    """Optimizer steps that the run has told of so far."""
    if not (run_dir / "events.jsonl").is_file():
        return 0
    return max((event.step or 0 for event in read_events(run_dir) if isinstance(event, Step)), default=0)


def conclude(run_dir: Path, seconds: float) -> int:
    """Hold the run against what a demo must show: a validation loss that fell, and never a step lost or done twice."""
    events = surviving(read_events(run_dir))
    losses = [(event.step, event.loss) for event in events if isinstance(event, Evaluation)]
    steps = [event.step for event in events if isinstance(event, Step)]
    say(f"done in {seconds:.0f} s: validation loss " + " -> ".join(f"{loss:.2f}" for _, loss in losses))
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
