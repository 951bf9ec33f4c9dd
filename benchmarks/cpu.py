"""`make bench`: shardwright compared with its peers on two CPU ranks, interleaved in one run.

    python -m benchmarks.cpu                      everything (10 to 15 minutes on two cores)
    python -m benchmarks.cpu --list               names of the comparisons and their contenders
    python -m benchmarks.cpu --case zero3-bf16    one comparison; repeatable
    python -m benchmarks.cpu --predict            measure nothing: predict the JSON's rows again
    python -m benchmarks.cpu --contender shardwright --contender torch-loop

A comparison is a zero_stage and a precision. Its contenders start in new processes, warm up, and
are then timed in turn (A B C A B C ...), so that other load slows them alike; each uses one thread
per rank. All start from the same weights and read the same tokens: a contender with another first
loss is an error, not a row. The planner's prediction is added to our rows, time and tensor bytes,
from rates measured on the same ranks right before. Results go to `<out>/cpu-two-ranks.json` and
`.md`, with `--publish` to docs/benchmarks too, where `cpu-two-ranks.notes.md` explains them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.case import LLAMA_29M, Case, Precision
from benchmarks.conditions import format_rows, read_conditions
from benchmarks.cpu_figures import average_over_ranks, print_comparison, summarise
from benchmarks.launch import Ranks, RanksFailed
from benchmarks.predicted import (
    build_candidate,
    build_cpu_cluster,
    measure_profile,
    predict_row,
)
from benchmarks.table import write_page
from shardwright.architecture import read_config
from shardwright.hardware import MeasuredProfile
from shardwright.hardware.measured_profile import read_profile
from shardwright.layout import Layout

SCHEMA_VERSION = 2
FIRST_LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}
"""Relative tolerance; bf16 kernels round differently (autocast runs some operations in fp32)."""
DOCS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
NUM_RANKS = 2
NEEDS = {"deepspeed": "deepspeed", "trainer": "accelerate"}
"""Contender -> package it needs."""


@dataclass(frozen=True)
class Comparison:
    """Contenders that do the same work."""

    zero_stage: int
    precision: Precision
    contenders: tuple[str, ...]
    compile: bool = False

    @property
    def name(self) -> str:
        """Name of the comparison for `--case`."""
        return f"zero{self.zero_stage}-{self.precision}" + ("-compile" if self.compile else "")


LOOPS = ("shardwright", "torch-loop", "torch-loop-own-decoder")
DEFAULT = tuple(
    comparison
    for precision in ("fp32", "bf16")
    for comparison in (
        Comparison(0, precision, (*LOOPS, "deepspeed", "trainer")),
        Comparison(1, precision, (*LOOPS, "deepspeed")),
        Comparison(3, precision, (*LOOPS, "deepspeed")),
    )
)
ON_REQUEST = (
    Comparison(0, "fp32", (*LOOPS, "deepspeed", "trainer"), compile=True),
    Comparison(0, "bf16", (*LOOPS, "deepspeed", "trainer"), compile=True),
    Comparison(3, "bf16", (*LOOPS, "deepspeed"), compile=True),
)


def main() -> int:
    """Return exit code 0 if every comparison succeeded, 1 if one failed, 2 for an unknown name."""
    arguments = parse_arguments()
    known = {comparison.name: comparison for comparison in (*DEFAULT, *ON_REQUEST)}
    if arguments.list:
        for comparison in known.values():
            print(
                f"{comparison.name:20}{' '.join(comparison.contenders)}"
                f"{'' if comparison in DEFAULT else '   (on request)'}"
            )
        return 0
    unknown = [name for name in arguments.case if name not in known]
    if unknown:
        print(f"No comparison {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    chosen = [known[name] for name in arguments.case] or list(DEFAULT)
    arguments.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "conditions": read_conditions(),
        "skipped": {},
    }
    docs = DOCS if arguments.publish else None
    # A run of some contenders only is another page: its rows were not timed in turn with those of
    # the others.
    name = "-".join(("cpu", *arguments.contender)) if arguments.contender else "cpu-two-ranks"
    comparisons = read_comparisons((docs or arguments.out) / f"{name}.json")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        result["num_parameters"] = write_initial_weights(Path(folder), arguments)
        for comparison in [] if arguments.predict else chosen:
            contenders = find_available(comparison, arguments.contender, result["skipped"])
            try:
                measured = measure(replace(comparison, contenders=contenders), folder, arguments)
            except RanksFailed as error:
                failed += 1
                print(f"{comparison.name} failed: {error}", file=sys.stderr)
                continue
            comparisons[comparison.name] = measured
            print_comparison(measured)
            result["comparisons"] = [comparisons[case] for case in known if case in comparisons]
            write_result(result, name, arguments.out, docs)
        if arguments.predict:
            result["conditions"] = json.loads(
                ((docs or arguments.out) / f"{name}.json").read_text()
            )["conditions"]
            for measured in comparisons.values():
                predict_comparison(measured, build_our_case(measured, folder))
                print_comparison(measured)
            result["comparisons"] = [comparisons[case] for case in known if case in comparisons]
            write_result(result, name, arguments.out, docs)
    return 1 if failed else 0


def read_comparisons(path: Path) -> dict[str, dict[str, Any]]:
    """Read earlier comparisons by name; none of another schema version."""
    content = json.loads(path.read_text()) if path.exists() else {}
    known = (
        content.get("comparisons", []) if content.get("schema_version") == SCHEMA_VERSION else []
    )
    return {measured["name"]: measured for measured in known}


def build_our_case(measured: dict[str, Any], folder: str) -> Case:
    """Return our case of an earlier comparison."""
    fields = (
        "zero_stage",
        "precision",
        "world_size",
        "sequence_length",
        "micro_batch_size",
        "compile",
    )
    return Case("shardwright", weights_dir=folder, **{name: measured[name] for name in fields})


def predict_comparison(measured: dict[str, Any], case: Case) -> None:
    """Add to our row the planner's prediction with the comparison's profile."""
    ours = measured["contenders"].get("shardwright")
    if ours is not None and measured["profile"] is not None:
        profile: MeasuredProfile = read_profile(measured["profile"])
        ours["predicted"] = predict_row(case, build_cpu_cluster(case.world_size, profile))


def write_result(result: dict[str, Any], name: str, out: Path, docs: Path | None) -> None:
    """Write JSON and Markdown to `out` and, if given, to the documentation's folder."""
    for folder in filter(None, (out, docs)):
        (folder / f"{name}.json").write_text(format_rows(result) + "\n")
        write_page(result, folder / f"{name}.md")
        print(folder / f"{name}.md", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--list", action="store_true", help="print the comparisons and exit")
    parser.add_argument(
        "--predict", action="store_true", help="measure nothing; predict the rows of the JSON again"
    )
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="NAME",
        help="measure this comparison only; repeatable",
    )
    parser.add_argument(
        "--contender",
        action="append",
        default=[],
        metavar="NAME",
        help="measure these contenders only",
    )
    parser.add_argument(
        "--rounds", type=int, default=4, help="timed blocks per contender (default 4)"
    )
    parser.add_argument(
        "--steps", type=int, default=2, help="optimizer steps per block (default 2)"
    )
    parser.add_argument(
        "--warmup", type=int, default=2, help="steps before the first timed block (default 2)"
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=LLAMA_29M["num_hidden_layers"],
        help="number of layers; fewer for a quick look",
    )
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument(
        "--publish",
        action="store_true",
        help="write the table of a whole run to docs/benchmarks too",
    )
    parser.add_argument(
        "--time-limit", type=float, default=300.0, help="seconds that one start or block may take"
    )
    return parser.parse_args()


def write_initial_weights(folder: Path, arguments: argparse.Namespace) -> int:
    """Write config.json and model.safetensors of all contenders, in another process; return the
    number of parameters.
    """
    config = LLAMA_29M | {"num_hidden_layers": arguments.layers}
    program = (
        "import json, sys, torch\n"
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        "torch.manual_seed(0)\n"
        "config = AutoConfig.for_model(**json.loads(sys.argv[2]))\n"
        "model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)\n"
        "model.save_pretrained(sys.argv[1])\n"
        "print(model.num_parameters())\n"
    )
    made = subprocess.run(
        [sys.executable, "-c", program, str(folder), json.dumps(config)],
        capture_output=True,
        text=True,
    )
    if made.returncode != 0:
        raise RanksFailed(f"making the initial weights failed:\n{made.stderr}")
    return int(made.stdout.split()[-1])


def find_available(
    comparison: Comparison, selected: list[str], skipped: dict[str, str]
) -> tuple[str, ...]:
    """Return the contenders whose packages are installed; add the others to `skipped` with the
    reason.
    """
    available = []
    for contender in comparison.contenders:
        if selected and contender not in selected:
            continue
        package = NEEDS.get(contender)
        if package is not None and importlib.util.find_spec(package) is None:
            skipped[contender] = f"the package {package} is not installed"
            continue
        available.append(contender)
    return tuple(available)


def measure(comparison: Comparison, folder: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the ranks' rates, time the contenders in turn, then measure our tensors' memory.

    Raises:
        RanksFailed: a rank ended or hangs, or a contender's first loss differs: it does not do the
        same work.
    """
    cases = [
        Case(
            contender=contender,
            zero_stage=comparison.zero_stage,
            precision=comparison.precision,
            compile=comparison.compile,
            weights_dir=folder,
            world_size=NUM_RANKS,
            sequence_length=arguments.sequence_length,
            micro_batch_size=arguments.micro_batch_size,
        )
        for contender in comparison.contenders
    ]
    load = os.getloadavg()[0]
    profile = None
    if "shardwright" in comparison.contenders:
        ours = replace(cases[0], contender="shardwright")
        runs = [
            (
                read_config(json.loads((Path(folder) / "config.json").read_text())),
                build_candidate(ours),
            )
        ]
        profile = measure_profile(runs, Layout(dp_replicate=NUM_RANKS))
    rows: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        running: list[tuple[str, Ranks]] = []
        for case in cases:
            ranks = stack.enter_context(
                Ranks(case, arguments.out / "logs", time_limit_seconds=arguments.time_limit)
            )
            started = ranks.wait_ready()
            first = ranks.run_block(arguments.warmup)
            rows[case.contender] = {
                "details": started[0]["details"],
                "blocks": [],
                "warmup": first,
                "start_up": started,
            }
            running.append((case.contender, ranks))
        check_first_losses(comparison, rows)
        for _ in range(arguments.rounds):
            for contender, ranks in running:
                rows[contender]["blocks"].append(ranks.run_block(arguments.steps))
        tensors = {
            contender: ranks.run_block(1, "memory")
            for contender, ranks in running
            if contender == "shardwright"
        }
    for row in rows.values():
        summarise(row, cases[0].tokens_per_step, arguments.steps)
    for contender, replies in tensors.items():
        rows[contender]["peak_allocated_bytes"] = max(
            reply["peak_tensor_bytes"] for reply in replies
        )
    measured = {
        "name": comparison.name,
        "zero_stage": comparison.zero_stage,
        "precision": comparison.precision,
        "compile": comparison.compile,
        "world_size": cases[0].world_size,
        "sequence_length": arguments.sequence_length,
        "micro_batch_size": arguments.micro_batch_size,
        "rounds": arguments.rounds,
        "steps_per_round": arguments.steps,
        "warmup_steps": arguments.warmup,
        "load_average": [round(load, 1), round(os.getloadavg()[0], 1)],
        "measured_at": read_conditions()["date"],
        "profile": None if profile is None else json.loads(json.dumps(profile.as_dict())),
        "contenders": rows,
    }
    predict_comparison(measured, cases[0])
    return measured


def check_first_losses(comparison: Comparison, rows: dict[str, dict[str, Any]]) -> None:
    """Raise unless first losses are equal, which proves equal weights, tokens and loss."""
    first = {name: average_over_ranks(row["warmup"])[0] for name, row in rows.items()}
    middle = median(first.values())
    worst = max(abs(loss - middle) / middle for loss in first.values())
    if worst > FIRST_LOSS_TOLERANCE[comparison.precision]:
        raise RanksFailed(f"{comparison.name}: first losses differ by {worst:.1e}: {first}")


if __name__ == "__main__":
    sys.exit(main())
