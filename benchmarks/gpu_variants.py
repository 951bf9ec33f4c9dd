"""Variants of a measurement on one device, each in a process of its own: arguments and runs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

_VARIANT_SECONDS = 120.0


def parse_variant_arguments(
    description: str, variants: Collection[str], num_steps: int, *, has_sets: bool = False
) -> argparse.Namespace:
    """Parse the command line; `variant` is set in the process of one variant.

    Args:
        num_steps: measured steps by default.
        has_sets: True if `--more` selects a second set of variants.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("precision", choices=("bf16", "fp32"))
    parser.add_argument("config", type=Path)
    parser.add_argument("length", type=int)
    parser.add_argument("rows", type=int)
    parser.add_argument("result", type=Path)
    parser.add_argument("--steps", type=int, default=num_steps, help="measured steps")
    parser.add_argument("--variant", choices=variants)
    parser.add_argument("--num-variants", type=int, default=len(variants))
    if has_sets:
        parser.add_argument("--more", action="store_true", help="the second set of variants")
    return parser.parse_args()


def run_variant(module: str, name: str) -> dict[str, Any]:
    """Run one variant with this process's arguments; return what it printed, or its failure."""
    command = [sys.executable, "-m", module, *sys.argv[1:], "--variant", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_VARIANT_SECONDS)
    except subprocess.TimeoutExpired:
        return {"failure": f"not finished after {_VARIANT_SECONDS:.0f} s"}
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    last = lines[-1] if lines else "no output"
    if done.returncode:
        return {"failure": last}
    result: dict[str, Any] = json.loads(last)
    return result
