"""Command line of `make gpu`. Imports the standard library only."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

NUM_PARTS = 12
PART_SECONDS = 520.0
"""Time limit of a part: nine minutes less the start of a machine."""
_WHEELS = Path(__file__).resolve().parents[1] / "build/gpu-wheels"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_parts",
        description="What one GPU can show, in parts of less than nine minutes.",
    )
    parser.add_argument("--part", type=_parse_part, help=f"one part, 1/{NUM_PARTS} and so on")
    parser.add_argument(
        "--step", action="append", default=[], metavar="PATTERN", help="steps to run, by name"
    )
    parser.add_argument(
        "--goals",
        action="store_true",
        help="only the speeds we aim at; with --seconds the most important first",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="time for all steps together: those without a result of this code first, and none "
        "that is expected to take longer than what is left",
    )
    parser.add_argument(
        "--warm",
        action=argparse.BooleanOptionalAction,
        help="compile before timing, several processes at a time, while tests run; default: with "
        "--seconds",
    )
    parser.add_argument(
        "--processes", type=int, help="processes that compile at once; default: by the device"
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
    parser.add_argument("--wheels", type=Path, default=_WHEELS)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "build/gpu"))
    arguments = parser.parse_args(argv)
    arguments.shapes = arguments.shapes or ("real" if arguments.device == "cuda" else "tiny")
    if arguments.warm is None:
        arguments.warm = arguments.seconds is not None
    arguments.out = arguments.out.resolve()
    return arguments


def _parse_part(text: str) -> int:
    number, _, total = text.partition("/")
    is_part = number.isdigit() and 1 <= int(number) <= NUM_PARTS and total in ("", str(NUM_PARTS))
    if not is_part:
        raise argparse.ArgumentTypeError(f"{text!r} is not a part; write 1/{NUM_PARTS} and so on")
    return int(number)
