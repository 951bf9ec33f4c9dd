"""`make gpu`: what one GPU can show, in parts of less than nine minutes, most informative first.

    make gpu                                            every part, one after another
    make gpu PART=3/10                                  one part
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
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.conditions import read_conditions
from benchmarks.gpu_packages import unpack_wheels
from benchmarks.gpu_page import render_page
from benchmarks.shapes import SHAPES, TINY, Shape

ROOT = Path(__file__).resolve().parents[1]
SCHEMA_VERSION = 1
NUM_PARTS = 10
PART_SECONDS = 520.0
"""Time limit of a part: nine minutes less the start of a machine."""
_MODULE = (sys.executable, "-m")
_LAST_LINES = 6
_KILL_SECONDS = 5.0


@dataclass(frozen=True)
class Step:
    """One process of a part; `{out}` in its command is its own folder."""

    name: str
    part: int
    time_limit_seconds: float
    command: tuple[str, ...]
    result: str
    """File in its folder with the result."""


def list_steps(arguments: argparse.Namespace) -> list[Step]:
    """List the steps in the order in which they run; `--step` selects by name."""
    shapes = SHAPES if arguments.shapes == "real" else TINY
    steps = [*_list_checks(arguments), *_list_speeds(arguments, shapes)]
    name, shape = next(iter(shapes.items()))
    length, rows = next(iter(shape.micro_batch_sizes.items()))
    config = (arguments.device, _choose_precision(arguments), "{out}/config.json")
    command = (*_MODULE, "benchmarks.gpu_profile", *config, str(length), str(rows))
    steps.append(
        Step(f"profile {name}-{length}", 3, 200, (*command, "{out}/profile.json"), "profile.json")
    )
    command = (*_MODULE, "benchmarks.gpu_step_cost", *config, str(length), str(rows))
    quick = ("--steps", "3", "--num-variants", "1") if arguments.quick else ()
    result = "step-cost.json"
    steps.append(
        Step(f"step cost {name}-{length}", 4, 500, (*command, f"{{out}}/{result}", *quick), result)
    )
    command = (*_MODULE, "benchmarks.gpu_offload", *config, str(length), str(rows))
    quick = ("--steps", "1", "--num-variants", "2") if arguments.quick else ()
    result = "offload.json"
    steps.append(
        Step(f"offload {name}-{length}", 8, 300, (*command, f"{{out}}/{result}", *quick), result)
    )
    module = "benchmarks.gpu_low_precision"
    command = (*_MODULE, module, arguments.device, arguments.shapes, "{out}/low-precision.json")
    steps.append(Step("low precision", 7, 500, command, "low-precision.json"))
    steps.sort(key=lambda step: step.part)
    patterns = arguments.step or ["*"]
    return [step for step in steps if any(fnmatchcase(step.name, pattern) for pattern in patterns)]


def _list_checks(arguments: argparse.Namespace) -> list[Step]:
    """List parts 1 and 2: the device, a run of all our code, numbers, and the tests."""
    device = arguments.device
    smoke = (
        *(
            "--device",
            device,
            "--shapes",
            "tiny",
            "--case",
            "tiny-64",
            "--contender",
            "shardwright",
        ),
        *("--rounds", "1", "--steps", "3", "--warmup", "1", "--time-limit", "100"),
        *("--no-tests", "--out", "{out}"),
    )
    tests = (
        *(*_MODULE, "pytest", "-q", "-p", "no:cacheprovider", "-W", "default"),
        *("-o", "addopts=--strict-markers -ra", "-m", "gpu" if device == "cuda" else "not gpu"),
        *("--junit-xml", "{out}/junit.xml"),
        *(("-k", arguments.tests) if arguments.tests else ()),
    )

    def test(name: str, part: int, *modules: str) -> Step:
        files = [f"tests/gpu/test_{module}.py" for module in modules]
        return Step(name, part, 300, (*tests, *files), "junit.xml")

    others = (
        "experts_on_cuda",
        "context_on_cuda",
        "offload_on_cuda",
        "doctor_on_cuda",
        "layouts_on_nccl",
        "faults_on_nccl",
    )
    described = (*_MODULE, "benchmarks.gpu_device", device, "{out}/device.json")
    compared = (*_MODULE, "benchmarks.gpu_numbers", device, "{out}/numbers.json")
    sizes = (_choose_precision(arguments), arguments.shapes)
    attention = (*_MODULE, "benchmarks.gpu_attention", device, *sizes, "{out}/attention.json")
    functions = (*_MODULE, "benchmarks.gpu_functions", device, sizes[1], "{out}/functions.json")
    return [
        Step("device", 1, 90, described, "device.json"),
        Step("smoke", 1, 120, (*_MODULE, "benchmarks.gpu", *smoke), "one-gpu.json"),
        Step("numbers", 1, 150, compared, "numbers.json"),
        test("tests of numbers", 1, "numerics_on_cuda", "decoder_on_cuda"),
        Step("attention", 2, 200, attention, "attention.json"),
        Step("functions", 2, 150, functions, "functions.json"),
        test("tests of training", 2, "training_on_cuda", "optimizers_on_cuda"),
        test("other tests", 2, *others),
    ]


def _list_speeds(arguments: argparse.Namespace, shapes: dict[str, Shape]) -> list[Step]:
    """List the cases, the smallest model and its plain variant first."""
    visits: tuple[str, ...] = ("--steps", "8", "--warmup", "3", "--time-limit", "150")
    if arguments.quick:
        visits = ("--steps", "2", "--warmup", "1", "--contender", "shardwright")
    precision = _choose_precision(arguments)
    fixed = ("--device", arguments.device, "--shapes", arguments.shapes, "--precision", precision)
    command = (*_MODULE, "benchmarks.gpu", *fixed, "--no-tests", "--rounds", "1", *visits)
    steps = []
    for place, (name, shape) in enumerate(shapes.items()):
        for number, length in enumerate(shape.micro_batch_sizes):
            for variant in shape.variants:
                is_first = place == number == 0 and variant in ("", "-compile")
                case = f"{name}-{length}{variant}"
                steps.append(
                    Step(
                        f"speed {case}",
                        3 if is_first else shape.part,
                        300,
                        (*command, "--case", case, "--out", "{out}"),
                        "one-gpu.json",
                    )
                )
    return steps


def _choose_precision(arguments: argparse.Namespace) -> str:
    return "bf16" if arguments.device == "cuda" else "fp32"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts. Return exit code 0; 1 if a step failed; 2 for wrong arguments or no device."""
    arguments = parse_arguments(argv)
    steps = list_steps(arguments)
    if arguments.list:
        for step in steps:
            print(f"{step.part}/{NUM_PARTS}  {step.name} (at most {step.time_limit_seconds:.0f} s)")
        return 0
    if arguments.publish:
        return publish(arguments.out, steps)
    environment = build_environment(arguments)
    if isinstance(environment, str):
        print(environment, file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    has_failed = False
    for part in [arguments.part] if arguments.part else range(1, NUM_PARTS + 1):
        until = time.monotonic() + arguments.budget
        for step in (step for step in steps if step.part == part):
            if arguments.missing and has_passed(arguments.out, step):
                continue
            outcome = run_step(step, arguments, environment, until)
            has_failed |= outcome["status"] not in ("passed", "no time left")
            write_results(arguments.out, steps)
            print(
                f"{part}/{NUM_PARTS}  {step.name}: {outcome['status']} "
                f"({outcome['seconds']:.0f} s)  {outcome['message']}",
                flush=True,
            )
    print(arguments.out / "gpu.md")
    return int(has_failed)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_parts", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--part", type=_parse_part, help=f"one part, 1/{NUM_PARTS} and so on")
    parser.add_argument(
        "--step", action="append", default=[], metavar="PATTERN", help="steps to run, by name"
    )
    parser.add_argument(
        "--missing", action="store_true", help="only steps that have not passed in <out>"
    )
    parser.add_argument("--list", action="store_true", help="print parts and steps, and exit")
    parser.add_argument(
        "--publish", action="store_true", help="copy the page and its JSON to docs/benchmarks"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shapes", choices=("real", "tiny"), help="default: tiny on a CPU")
    parser.add_argument("--tests", default="", help="only tests that pytest -k selects")
    parser.add_argument(
        "--quick", action="store_true", help="two steps of shardwright per case, for rehearsals"
    )
    parser.add_argument("--budget", type=float, default=PART_SECONDS, help="seconds of a part")
    parser.add_argument("--wheels", type=Path, default=ROOT / "build/gpu-wheels")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "build/gpu"))
    arguments = parser.parse_args(argv)
    arguments.shapes = arguments.shapes or ("real" if arguments.device == "cuda" else "tiny")
    arguments.out = arguments.out.resolve()
    return arguments


def _parse_part(text: str) -> int:
    number, _, total = text.partition("/")
    is_part = number.isdigit() and 1 <= int(number) <= NUM_PARTS and total in ("", str(NUM_PARTS))
    if not is_part:
        raise argparse.ArgumentTypeError(f"{text!r} is not a part; write 1/{NUM_PARTS} and so on")
    return int(number)


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
    step: Step, arguments: argparse.Namespace, environment: dict[str, str], until: float
) -> dict[str, Any]:
    """Run a step and write its outcome; nothing that it does ends the part."""
    folder = get_folder(arguments.out, step)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shapes = SHAPES if arguments.shapes == "real" else TINY
    (folder / "config.json").write_text(json.dumps(next(iter(shapes.values())).config))
    limit = min(step.time_limit_seconds, until - time.monotonic())
    start_seconds = time.monotonic()
    if limit <= 0:
        status = "no time left"
        message = f"run it: make gpu PART={step.part}/{NUM_PARTS} ARGS=--missing"
    else:
        status, message = _run_process(step, folder, environment, limit)
    outcome = {
        "name": step.name,
        "part": step.part,
        "status": status,
        "seconds": time.monotonic() - start_seconds,
        "time_limit_seconds": step.time_limit_seconds,
        "message": message,
        "conditions": read_conditions(),
    }
    (folder / "outcome.json").write_text(json.dumps(outcome, indent=1) + "\n")
    return outcome


def _run_process(
    step: Step, folder: Path, environment: dict[str, str], limit_seconds: float
) -> tuple[str, str]:
    """Return status and message; a process over its time is killed with all that it started."""
    command = [word.replace("{out}", str(folder)) for word in step.command]
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
    """Return the last lines of a log on one line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return " / ".join([line for line in lines if line][-_LAST_LINES:])[-600:]


def get_folder(out: Path, step: Step) -> Path:
    """Return the folder of a step."""
    return out / "steps" / f"{step.part}-{step.name.replace(' ', '-')}"


def write_results(out: Path, steps: Sequence[Step]) -> None:
    """Collect the results of all steps that have ended, in this call and before, and write them."""
    collected = []
    for step in steps:
        folder = get_folder(out, step)
        if not (folder / "outcome.json").is_file():
            collected.append({"name": step.name, "part": step.part, "status": "not run"})
            continue
        outcome = json.loads((folder / "outcome.json").read_text())
        result = folder / step.result
        if result.suffix == ".json" and result.is_file():
            try:
                outcome["result"] = json.loads(result.read_text())
            except ValueError as error:
                outcome["message"] += f"; {result.name} is damaged ({error})"
        elif result.is_file():
            outcome["result"] = {"junit": result.read_text(errors="replace")}
        collected.append(outcome)
    content = {"schema_version": SCHEMA_VERSION, "num_parts": NUM_PARTS, "steps": collected}
    for name, text in (
        ("gpu.md", render_page(content)),
        ("gpu.json", json.dumps(content, indent=1) + "\n"),
    ):
        partial = out / f"{name}.partial"
        partial.write_text(text)
        partial.replace(out / name)


def has_passed(out: Path, step: Step) -> bool:
    """True if the folder has a result of the step that passed."""
    outcome = get_folder(out, step) / "outcome.json"
    return outcome.is_file() and json.loads(outcome.read_text())["status"] == "passed"


def restore_results(content: dict[str, Any], out: Path, steps: Sequence[Step]) -> None:
    """Write the outcomes and results of `gpu.json` to the folders of steps that have none."""
    outcomes = {outcome["name"]: outcome for outcome in content["steps"]}
    for step in steps:
        folder = get_folder(out, step)
        outcome = outcomes.get(step.name, {})
        if "seconds" not in outcome or (folder / "outcome.json").is_file():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        result = outcome.pop("result", None)
        if result is not None:
            text = result["junit"] if step.result.endswith(".xml") else json.dumps(result, indent=1)
            (folder / step.result).write_text(text)
        (folder / "outcome.json").write_text(json.dumps(outcome, indent=1) + "\n")


def publish(out: Path, steps: Sequence[Step]) -> int:
    """Write the page of the steps in `out` to docs/benchmarks; return the exit code.

    Steps that `out` lacks keep what has been published of them.
    """
    if not (out / "steps").is_dir():
        print(f"{out / 'steps'} does not exist; run `make gpu` first", file=sys.stderr)
        return 2
    folder = ROOT / "docs/benchmarks"
    if (folder / "gpu.json").is_file():
        restore_results(json.loads((folder / "gpu.json").read_text()), out, steps)
    write_results(out, steps)
    notes = folder / "gpu.notes.md"
    if notes.is_file():
        with (out / "gpu.md").open("a") as page:
            page.write("\n" + notes.read_text())
    for name in ("gpu.json", "gpu.md"):
        shutil.copyfile(out / name, folder / name)
        print(folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
