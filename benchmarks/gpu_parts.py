"""`make gpu`: what one GPU can show, in parts of less than nine minutes, most informative first.

    make gpu                                            every part, one after another
    make gpu PART=3/12                                  one part
    make gpu ARGS="--goals --seconds 560"               the speeds we aim at, in 560 seconds
    make gpu ARGS="--seconds 240 --missing"             what is missing, in 240 seconds
    make gpu ARGS="--device cpu --shapes tiny"          a rehearsal without a GPU
    python -m benchmarks.gpu_parts --list               parts and their steps

It uses the Python that is given (PYTHON=...) and downloads nothing; packages that this Python lacks
come from build/gpu-wheels (`make gpu-wheels`). Each step is a process with its own time limit. Its
result is written as soon as it ends, so a failing step or a killed part leaves the others. Results
go to <out>/gpu.json and gpu.md (<out>: $OUT, else build/gpu). Folders <out>/steps of several calls
may be copied together; `--publish` writes both files again, and to docs/benchmarks, with the notes
of docs/benchmarks/gpu.notes.md. It imports the standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.conditions import read_conditions
from benchmarks.gpu_arguments import NUM_PARTS, parse_arguments
from benchmarks.gpu_order import (
    estimate_seconds,
    has_current_result,
    hash_code,
    list_options,
    order_by_information,
    read_started,
    select_fitting,
)
from benchmarks.gpu_packages import unpack_wheels
from benchmarks.gpu_results import (
    get_folder,
    has_passed,
    publish,
    read_last_outcomes,
    write_outcome,
    write_results,
)
from benchmarks.gpu_steps import Step, list_steps
from benchmarks.gpu_warm import (
    choose_num_processes,
    compile_ahead,
    discard_choices,
    list_cache_variables,
)
from benchmarks.shapes import SHAPES, TINY

ROOT = Path(__file__).resolve().parents[1]
_LAST_LINES = 6
_KILL_SECONDS = 5.0
_LONGEST_FACTOR = 2.0
_LONGEST_MORE_SECONDS = 60.0
"""A step in limited time is ended after so many times its expected seconds, and so many more."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts. Return exit code 0; 1 if a step failed; 2 for wrong arguments or no device."""
    start_seconds = time.monotonic()
    arguments = parse_arguments(argv)
    steps = list_steps(arguments)
    if arguments.list:
        print_steps(steps, arguments)
        return 0
    if arguments.publish:
        every_step = argparse.Namespace(**vars(arguments) | {"goals": False, "step": []})
        return publish(arguments.out, list_steps(every_step))
    environment = build_environment(arguments)
    if isinstance(environment, str):
        print(environment, file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    has_failed = False
    chosen = [
        step
        for step in steps
        if arguments.part in (None, step.part)
        and not (arguments.missing and has_passed(arguments.out, step))
    ]
    if arguments.seconds is not None:
        until = start_seconds + arguments.seconds
        has_failed = run_in_time(chosen, steps, arguments, environment, until)
    else:
        for part in sorted({step.part for step in chosen}):
            until = time.monotonic() + arguments.budget
            own = [step for step in chosen if step.part == part]
            has_failed |= run_steps(own, steps, arguments, environment, until)
    print(arguments.out / "gpu.md")
    return int(has_failed)


def print_steps(steps: Sequence[Step], arguments: argparse.Namespace) -> None:
    """Print the steps with their expected seconds; with `--seconds` in the order of a run."""
    outcomes = read_last_outcomes(arguments.out, steps)
    ordered = steps if arguments.seconds is None else order_by_information(steps, outcomes)
    for step in ordered:
        is_current = has_current_result(step, outcomes)
        print(
            f"{step.part}/{NUM_PARTS}  {step.name} (about {estimate_seconds(step, outcomes):.0f}, "
            f"at most {step.time_limit_seconds:.0f} s){' measured' if is_current else ''}"
        )


def run_in_time(
    chosen: Sequence[Step],
    steps: Sequence[Step],
    arguments: argparse.Namespace,
    environment: dict[str, str],
    until: float,
) -> bool:
    """Run those of the chosen steps that fit into the time; return True if one failed.

    Those without a result of the present code come first. A step starts if its last time, or its
    estimate, is left.
    """
    outcomes = read_last_outcomes(arguments.out, steps)
    ordered = order_by_information(chosen, outcomes)
    return run_steps(ordered, steps, arguments, environment, until, outcomes)


def run_steps(
    chosen: Sequence[Step],
    steps: Sequence[Step],
    arguments: argparse.Namespace,
    environment: dict[str, str],
    until: float,
    outcomes: Mapping[str, Mapping[str, Any]] | None = None,
) -> bool:
    """Run the chosen steps one after another, compiled before if `--warm` is given; return True if
    one failed.

    Args:
        steps: All steps of the page.
        until: Reading of `time.monotonic` at which the time ends.
        outcomes: Last outcomes by name; with them a step starts only if it is expected to end in
            time.
    """
    report = partial(finish_step, arguments=arguments, steps=steps)
    warm: dict[str, float] = {}
    has_failed = False
    if arguments.warm:
        left = until - time.monotonic()
        expected = list(chosen) if outcomes is None else select_fitting(chosen, outcomes, left)
        tested = [step for step in expected if not step.is_timed]
        warm, ended = warm_up(expected, tested, arguments, environment, until)
        chosen = [step for step in chosen if step not in tested]
        for step, outcome in zip(tested, ended, strict=True):
            has_failed |= report(step, outcome)
    for step in chosen:
        needed = 0.0 if outcomes is None else estimate_seconds(step, outcomes)
        outcome = run_step(
            step, arguments, environment, until, needed, warm_seconds=warm.get(step.name)
        )
        has_failed |= report(step, outcome)
    return has_failed


def finish_step(
    step: Step, outcome: dict[str, Any], *, arguments: argparse.Namespace, steps: Sequence[Step]
) -> bool:
    """Write the page again and print the outcome; return True if the step failed."""
    write_results(arguments.out, steps)
    print(
        f"{step.part}/{NUM_PARTS}  {step.name}: {outcome['status']} "
        f"({outcome['seconds']:.0f} s)  {outcome['message']}",
        flush=True,
    )
    return outcome["status"] not in ("passed", "no time left")


def warm_up(
    expected: Sequence[Step],
    tested: Sequence[Step],
    arguments: argparse.Namespace,
    environment: dict[str, str],
    until: float,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Compile the kernels of the expected steps while tests run, in half of the time at most.

    Returns:
        Seconds of compilation by step, and the outcomes of the tests.
    """
    start_seconds = time.monotonic()
    half = (until - start_seconds) / 2
    outcomes: dict[str, dict[str, Any]] = {}

    def test(step: Step) -> None:
        outcomes[step.name] = run_step(step, arguments, environment, until)

    def run_process(command: Sequence[str], folder: Path, seconds: float) -> tuple[str, str]:
        return _run_process(command, folder, environment, seconds)

    num_processes = arguments.processes or choose_num_processes(read_memory_bytes(arguments))
    compiled = compile_ahead(
        expected,
        arguments.out / "warm",
        num_processes,
        run_process,
        half,
        [partial(test, step) for step in tested],
    )
    num_choices = discard_choices(Path(environment["TORCHINDUCTOR_CACHE_DIR"]))
    seconds: dict[str, float] = {}
    for each in compiled:
        seconds[each.step_name] = seconds.get(each.step_name, 0.0) + each.seconds
        if each.status != "passed":
            print(f"compiling for {each.step_name}: {each.status}  {each.message}", flush=True)
    num_passed = sum(each.status == "passed" for each in compiled)
    print(
        f"compiled {num_passed} of {len(compiled)} cases, {num_processes} at a time, in "
        f"{time.monotonic() - start_seconds:.0f} s; {num_choices} tile sizes discarded",
        flush=True,
    )
    return seconds, [outcomes[step.name] for step in tested]


def read_memory_bytes(arguments: argparse.Namespace) -> int | None:
    """Return the memory of the device; None for a CPU."""
    if arguments.device == "cpu":
        return None
    code = "import torch; print(torch.cuda.get_device_properties(0).total_memory)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return int(printed.stdout)


def build_environment(arguments: argparse.Namespace) -> dict[str, str] | str:
    """Return the environment of the steps, with unpacked wheels; a message if they cannot run."""
    paths = [str(ROOT / "src"), str(ROOT)]
    if arguments.wheels.is_dir():
        packages = arguments.wheels.with_name("gpu-packages")
        try:
            unpack_wheels(arguments.wheels, packages)
        except (OSError, ValueError) as error:
            return str(error)
        paths.append(str(packages))
        sys.path.append(str(packages))  # versions of packages for the page
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if arguments.warm:
        environment |= list_cache_variables(ROOT / "build/gpu-cache")
    check = "import torch; raise SystemExit(0 if torch.cuda.is_available() else 3)"
    code = subprocess.run([sys.executable, "-c", check], env=environment).returncode
    if code not in (0, 3):
        return f"{sys.executable} has no torch; choose another Python: make gpu PYTHON=..."
    if code == 3 and arguments.device == "cuda":
        return (
            "torch finds no CUDA device; "
            '`make gpu ARGS="--device cpu --shapes tiny"` rehearses without one'
        )
    return environment


def run_step(
    step: Step,
    arguments: argparse.Namespace,
    environment: dict[str, str],
    until: float,
    needed_seconds: float = 0.0,
    warm_seconds: float | None = None,
) -> dict[str, Any]:
    """Run a step and write its outcome; nothing that it does ends the part.

    A step without time left keeps the outcome that it has.

    Args:
        needed_seconds: Expected seconds. The step does not start if less time is left, and is
            ended if it takes far longer, so that those after it have time.
        warm_seconds: Seconds in which other processes have compiled its kernels.
    """
    folder = get_folder(arguments.out, step)
    left = until - time.monotonic()
    outcome: dict[str, Any] = {"name": step.name, "part": step.part}
    if left <= max(0.0, needed_seconds):
        needs = f"about {needed_seconds:.0f} s needed, {max(0.0, left):.0f} left; "
        message = f"run it: make gpu PART={step.part}/{NUM_PARTS} ARGS=--missing"
        message = (needs if needed_seconds else "") + message
        outcome |= {"status": "no time left", "seconds": 0.0, "message": message}
        outcome |= {"time_limit_seconds": step.time_limit_seconds, "conditions": read_conditions()}
        if read_started(folder) is None and not (folder / step.result).is_file():
            write_outcome(folder, outcome)
        return outcome
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shapes = SHAPES if arguments.shapes == "real" else TINY
    shape = shapes[step.shape_name] if step.shape_name else next(iter(shapes.values()))
    (folder / "config.json").write_text(json.dumps(shape.config))
    start_seconds = time.monotonic()
    limit = min(step.time_limit_seconds, left)
    if needed_seconds:
        limit = min(limit, _LONGEST_FACTOR * needed_seconds + _LONGEST_MORE_SECONDS)
    # If this process is killed meanwhile, what the step has written is not lost.
    interrupted = {"status": "interrupted", "seconds": 0.0, "message": "the call ended during it"}
    write_outcome(folder, outcome | interrupted | {"conditions": read_conditions()})
    status, message = _run_process(step.command, folder, environment, limit)
    outcome |= {
        "status": status,
        "seconds": time.monotonic() - start_seconds,
        "time_limit_seconds": step.time_limit_seconds,
        "message": message,
        "code": hash_code(step),
        "options": list_options(step.command),
        "conditions": read_conditions(),
    }
    if warm_seconds is not None:
        outcome["warm_seconds"] = warm_seconds
    write_outcome(folder, outcome)
    return outcome


def _run_process(
    words: Sequence[str], folder: Path, environment: dict[str, str], limit_seconds: float
) -> tuple[str, str]:
    """Return status and message; a process over its time is killed with all that it started."""
    command = [word.replace("{out}", str(folder)) for word in words]
    log = folder / "log.txt"
    with log.open("w") as output:
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return "failed", str(error)
        try:
            code = process.wait(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            _kill(process)
            return "timed out", f"after {limit_seconds:.0f} s; {read_end(log)}"
        except BaseException:
            _kill(process)
            raise
    return ("passed", "") if code == 0 else ("failed", f"exit code {code}; {read_end(log)}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=_KILL_SECONDS)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def read_end(log: Path) -> str:
    """Return the last lines of a log on one line, with paths from the root of the project."""
    text = log.read_text(errors="replace").replace(f"{ROOT}/", "")
    lines = [line.strip() for line in text.splitlines()]
    return " / ".join([line for line in lines if line][-_LAST_LINES:])[-600:]


def end_with_steps(number: int, _frame: object) -> NoReturn:
    """Exit at a signal, so that the running step is ended too: it has a session of its own, and
    would occupy the device that the next call measures."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end_with_steps)
    sys.exit(main())
