"""The GPU tests, then fine-tuning steps on one GPU compared with HF Trainer.

    python -m benchmarks.gpu                        tests and every case, 2 to 6 minutes each
    python -m benchmarks.gpu --list                 names of the cases
    python -m benchmarks.gpu --no-tests --case 'llama-3.2-1b-4096*' --rounds 1
    python -m benchmarks.gpu --tests-only
    python -m benchmarks.gpu --device cpu --shapes tiny        a rehearsal without a GPU, in fp32

`make gpu` (`benchmarks.gpu_parts`) runs it case by case.

It uses the Python that runs it and downloads nothing; missing packages are named and skipped.
Contenders of a case run in turn (A B A B), alive together where the memory allows it.
Results go to <out>/one-gpu.json and .md after every case (<out>: $OUT, else build/gpu), so that an
interrupted run or a failing case keeps the others. The planner's prediction is added to our rows:
time, allocated and reserved bytes.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.conditions import read_conditions
from benchmarks.gpu_case import CaseDoesNotFitError, GpuCase
from benchmarks.gpu_figures import check_first_losses, print_case, summarise
from benchmarks.gpu_turns import Rounds, Visits, visit_in_turn
from benchmarks.shapes import SHAPES, TINY
from benchmarks.table import write_page

if TYPE_CHECKING:
    from shardwright.hardware import Cluster

SCHEMA_VERSION = 2
_OURS = ("pydantic", "yaml", "numpy", "safetensors", "psutil", "rich", "tokenizers")
NEEDS = {
    "shardwright": _OURS,
    "trainer": (*_OURS, "transformers", "accelerate"),
    "trainer-liger": (*_OURS, "transformers", "accelerate", "liger_kernel"),
    "torchtune": (*_OURS, "torchtune", "tqdm"),
}
"""Packages of each contender. Ours read the model of a case."""
TESTS_NEED = ("pytest", "hypothesis", "transformers", *_OURS)


def main() -> int:
    """Return exit code 0 if all that can run succeeded, 1 if a test or contender failed, 2 for an
    unknown case, a missing device or a missing torch.
    """
    arguments = parse_arguments()
    shapes = TINY if arguments.shapes == "tiny" else SHAPES
    cases = [
        GpuCase(name, shape, length, variant)
        for name, shape in shapes.items()
        for length in shape.micro_batch_sizes
        for variant in shape.variants
    ]
    if arguments.list:
        print("\n".join(case.name for case in cases))
        return 0
    patterns = arguments.case or ["*"]
    cases = [
        case
        for case in cases
        if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns)
    ]
    if not cases:
        print(f"No case matches {', '.join(patterns)}; --list names them", file=sys.stderr)
        return 2
    if importlib.util.find_spec("torch") is None:
        print(
            f"{sys.executable} has no torch; choose another Python: make gpu PYTHON=...",
            file=sys.stderr,
        )
        return 2
    if arguments.device == "cuda" and not has_cuda():
        rehearsal = "--device cpu --shapes tiny"
        print(
            f'torch finds no CUDA device; `make gpu ARGS="{rehearsal}"` rehearses without one',
            file=sys.stderr,
        )
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    contenders, skipped = find_contenders(arguments.contender)
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}", flush=True)
    if arguments.compile_only:
        return int(not compile_cases(cases, contenders, skipped, arguments))
    failed = not arguments.no_tests and not run_tests(arguments.device, arguments.tests, skipped)
    if arguments.tests_only:
        return int(failed)
    failed |= measure_cases(cases, contenders, skipped, arguments)
    return int(failed)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--list", action="store_true", help="print the cases and exit")
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="PATTERN",
        help="cases to run, shell patterns; repeatable",
    )
    parser.add_argument(
        "--contender",
        action="append",
        default=[],
        metavar="NAME",
        help=f"contenders to run, of {', '.join(NEEDS)}; repeatable",
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="visits to each contender (default 2)"
    )
    parser.add_argument(
        "--steps", type=int, default=8, help="timed optimizer steps per visit (default 8)"
    )
    parser.add_argument("--warmup", type=int, default=3, help="steps before them (default 3)")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=240.0,
        help="seconds for start, warm-up (compilation) or steps",
    )
    tests_group = parser.add_mutually_exclusive_group()
    tests_group.add_argument("--no-tests", action="store_true", help="skip tests/gpu")
    tests_group.add_argument("--tests-only", action="store_true", help="run tests/gpu only")
    parser.add_argument(
        "--tests",
        default="",
        metavar="EXPRESSION",
        help="run only the tests of tests/gpu that pytest -k EXPRESSION selects",
    )
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="two steps of one layer (two, if layers alternate): fill the compiler's caches",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--shapes", choices=("real", "tiny"), help="default: real on cuda, tiny on cpu"
    )
    parser.add_argument(
        "--precision",
        choices=("bf16", "fp32"),
        help="precision of compute; default: bf16 on cuda, fp32 on cpu",
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "build/gpu"))
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    arguments.shapes = arguments.shapes or ("real" if on_gpu else "tiny")
    arguments.precision = arguments.precision or ("bf16" if on_gpu else "fp32")
    return arguments


def has_cuda() -> bool:
    """Ask torch in another process: a CUDA context here would take memory from every contender."""
    process = subprocess.run(
        [sys.executable, "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"]
    )
    return process.returncode == 0


def find_contenders(selected: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the contenders that can run here, and the others with the reason."""
    skipped = {
        contender: reason
        for contender, packages in NEEDS.items()
        if (reason := name_missing(packages))
    }
    return [
        name for name in NEEDS if name not in skipped and (not selected or name in selected)
    ], skipped


def name_missing(packages: Iterable[str]) -> str:
    """Name the packages that are not installed; return "" if all are."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def run_tests(device: str, expression: str, skipped: dict[str, str]) -> bool:
    """Run tests/gpu on the device with the installed versions; return False if a test failed or
    `expression` selects none.
    """
    reason = name_missing(TESTS_NEED)
    if reason:
        skipped["tests/gpu"] = reason
        print(f"skipped tests/gpu: {reason}", flush=True)
        return True
    root = Path(__file__).resolve().parents[1]
    source = os.pathsep.join(filter(None, [str(root / "src"), os.environ.get("PYTHONPATH")]))
    # Warnings of untested versions and settings of absent plugins are no failures here.
    options = [
        "-q",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=--strict-markers -ra",
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu",
        *options,
        "-m",
        "gpu" if device == "cuda" else "not gpu",
    ]
    if expression:
        command += ["-k", expression]
    return (
        subprocess.run(command, cwd=root, env=os.environ | {"PYTHONPATH": source}).returncode == 0
    )


def measure_cases(
    cases: list[GpuCase],
    contenders: list[str],
    skipped: dict[str, str],
    arguments: argparse.Namespace,
) -> bool:
    """Measure the cases one by one and write the results after each; return True if a contender
    failed.
    """
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "conditions": read_conditions(),
        "precision": arguments.precision,
        "device": measure_ceiling(arguments.device, arguments.precision, arguments.shapes),
        "skipped": skipped,
        "cases": [],
    }
    failed = False
    cluster = find_cluster(result["device"]["name"], contenders)
    for number, case in enumerate(cases):
        try:
            case = fit(case, cluster, arguments)
            ceiling = (
                measure_ceiling(arguments.device, arguments.precision, arguments.shapes)
                if number
                else result["device"]
            )
            selected = select_contenders(case, contenders, skipped)
            measured = measure(
                case, selected, arguments, ceiling["matmul_flops_per_second"], cluster
            )
        except CaseDoesNotFitError as error:
            skipped[case.name] = str(error)
        except Exception as error:  # a failing case must not end the others
            traceback.print_exc()
            skipped[case.name] = f"failed: {type(error).__name__}: {error}"
            failed = True
        else:
            failed |= any(
                "failed" in row and "out of memory" not in row["failed"]
                for row in measured["contenders"].values()
            )
            result["cases"].append(measured)
            result["device"]["matmul_flops_per_second"] = median(
                each["matmul_flops_per_second"] for each in result["cases"]
            )
            print_case(measured)
        (arguments.out / "one-gpu.json").write_text(json.dumps(result, indent=1) + "\n")
        write_page(result, arguments.out / "one-gpu.md")
    print(arguments.out / "one-gpu.md")
    return failed


def compile_cases(
    cases: list[GpuCase],
    contenders: list[str],
    skipped: dict[str, str],
    arguments: argparse.Namespace,
) -> bool:
    """Fill the compiler's caches with the cases' kernels; return False if a contender failed.

    Settings are chosen as where shardwright is measured too.
    """
    name = "CPU"
    if arguments.device == "cuda":
        code = "import torch; print(torch.cuda.get_device_name())"
        command = [sys.executable, "-c", code]
        name = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    measured = [contender for contender in NEEDS if contender not in skipped]
    cluster = find_cluster(name, measured)
    has_passed = True
    for case in cases:
        fitted = fit(case, cluster, arguments)
        has_two_kinds = "sliding_window" in case.shape.config
        small = replace(fitted, num_layers=2 if has_two_kinds else 1)
        visits = visit(small, select_contenders(case, contenders, {}), arguments, Rounds(1, 1, 1))
        has_passed &= not visits.failures
    return has_passed


def fit(case: GpuCase, cluster: Cluster | None, arguments: argparse.Namespace) -> GpuCase:
    """Return the case with settings that fit the device, if the case leaves them open."""
    if not case.shape.settings:
        return case
    from benchmarks.gpu_fit import fit_case

    return fit_case(case, cluster, arguments.device, arguments.precision)


def visit(
    case: GpuCase, contenders: list[str], arguments: argparse.Namespace, rounds: Rounds
) -> Visits:
    """Run the contenders of a case in turn."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case.config))
        fixed = (folder, arguments.device, arguments.precision)
        cases = {name: case.build_case(name, *fixed) for name in contenders}
        logs = arguments.out / "logs" / case.name
        return visit_in_turn(cases, logs, rounds, arguments.time_limit)


def select_contenders(case: GpuCase, contenders: list[str], skipped: dict[str, str]) -> list[str]:
    """Return the contenders that can run a case; the others of adapters need peft."""
    reason = name_missing(("peft",)) if case.shape.lora_rank is not None else ""
    if reason:
        skipped["other contenders with LoRA"] = reason
    has_peers = case.shape.has_peers and not reason
    own = {"shardwright"}
    if case.settings.has_bf16_weights and case.settings.optimizer == "adamw":
        own.add("torchtune")
    return [name for name in contenders if has_peers or name in own]


def find_cluster(device_name: str, contenders: list[str]) -> Cluster | None:
    """Return the cluster to predict on; None if the catalogue lacks the device, or if shardwright,
    whose packages the planner needs, is not measured.
    """
    if "shardwright" not in contenders:
        return None
    from benchmarks.predicted import find_catalogue_cluster

    return find_catalogue_cluster(device_name)


def measure(
    case: GpuCase,
    contenders: list[str],
    arguments: argparse.Namespace,
    ceiling: float,
    cluster: Cluster | None = None,
) -> dict[str, Any]:
    """Time the contenders in turn, `rounds` times, and add the prediction to our row. A failure is
    a row and does not end the case.

    Args:
        ceiling: FLOP/s of matrix products on the device, measured just before.
    """
    flops_per_token = case.count_flops_per_token()
    rounds = Rounds(arguments.rounds, arguments.warmup, arguments.steps)
    visits = visit(case, contenders, arguments, rounds)
    tokens = case.micro_batch_size * case.sequence_length * arguments.steps
    rows: dict[str, dict[str, Any]] = {
        name: {"failed": visits.failures[name]}
        if name in visits.failures
        else summarise(replies, tokens, flops_per_token, ceiling)
        for name, replies in visits.replies.items()
    }
    check_first_losses(case.name, rows)
    if cluster is not None and "tokens_per_second" in rows.get("shardwright", {}):
        from benchmarks.predicted import predict_row

        ours = case.build_case("shardwright", "", arguments.device, arguments.precision)
        rows["shardwright"]["predicted"] = predict_row(ours, cluster, case.config)
    return case.describe() | {
        "rounds": arguments.rounds,
        "are_alive_together": visits.are_alive_together,
        "steps": arguments.steps,
        "warmup_steps": arguments.warmup,
        "flops_per_token": flops_per_token,
        "matmul_flops_per_second": ceiling,
        "contenders": rows,
    }


def measure_ceiling(device: str, precision: str, shapes: str) -> dict[str, Any]:
    """Measure the rates of the device now, in another process."""
    command = [sys.executable, "-m", "benchmarks.ceiling", device, precision, shapes]
    measured = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    ceiling: dict[str, Any] = json.loads(measured.stdout.splitlines()[-1])
    return ceiling


if __name__ == "__main__":
    sys.exit(main())
