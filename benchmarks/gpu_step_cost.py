"""Cost of what surrounds a step: the training loop with each of its switches off, on one GPU.

    python -m benchmarks.gpu_step_cost cuda bf16 config.json 4096 2 step-cost.json

Each variant is a run of `sw.train` in a process of its own on random text. The rate is that at
which the loop starts steps, after the first ones: evaluations and checkpoints are not part of it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.gpu_variants import parse_variant_arguments, run_variant

VARIANTS = {
    "as by default": "",
    "model.compile: false": "blocks run uncompiled",
    "the host waits for every step": "its event is written when its update has ended",
    "Python's own garbage collection": "whenever enough objects have been allocated",
}
"""Name -> what is different."""
WARM_UP_STEPS = 5


class _Measured(Exception):
    """Ends a run after its last measured step, before it saves."""


def main() -> int:
    """Return exit code 0, or 1 if no variant could run."""
    arguments = parse_variant_arguments(__doc__.split("\n\n")[0], VARIANTS, num_steps=60)
    if arguments.variant is not None:
        print(json.dumps(measure_variant(arguments)))
        return 0
    variants: list[dict[str, Any]] = []
    for name, difference in list(VARIANTS.items())[: arguments.num_variants]:
        measured = run_variant("benchmarks.gpu_step_cost", name)
        variants.append({"name": name, "difference": difference} | measured)
        arguments.result.write_text(json.dumps({"variants": variants}, indent=1) + "\n")
    return int(all("failure" in row for row in variants))


def measure_variant(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with one variant; return its rate, peak memory and whether blocks were compiled."""
    import torch

    from shardwright.config import Recipe
    from shardwright.training import loop
    from shardwright.training.run import train

    starts: list[float] = []
    run_step = loop.TrainingLoop._run_step
    last_step = WARM_UP_STEPS + arguments.steps

    def record_start(self: Any) -> Any:
        if self.state.step == last_step:
            raise _Measured
        starts.append(time.perf_counter())
        return run_step(self)

    with (
        tempfile.TemporaryDirectory() as name,
        patch.object(loop.TrainingLoop, "_run_step", record_start),
    ):
        folder = Path(name)
        recipe = Recipe.model_validate(build_recipe(folder, arguments, last_step + 1))
        if arguments.variant == "the host waits for every step":
            loop.TrainingLoop._may_finish_later = lambda *_: False  # type: ignore[method-assign]
        elif arguments.variant == "Python's own garbage collection":
            loop.GarbageCollection = PythonCollection  # type: ignore[assignment, misc]
        with suppress(_Measured):
            train(recipe)
        plan = json.loads((folder / "run" / "plan.json").read_text())
    seconds = starts[-1] - starts[WARM_UP_STEPS]
    step_seconds = seconds / (len(starts) - 1 - WARM_UP_STEPS)
    return {
        "step_seconds": step_seconds,
        "tokens_per_second": arguments.rows * arguments.length / step_seconds,
        "compiled": plan["compile"],
        "peak_bytes": torch.cuda.max_memory_allocated() if arguments.device == "cuda" else None,
        "reserved_bytes": torch.cuda.max_memory_reserved() if arguments.device == "cuda" else None,
    }


class PythonCollection:
    """Context in which Python's garbage collector works as it does elsewhere."""

    def __enter__(self) -> PythonCollection:
        return self

    def collect_if_due(self, step: int) -> None:
        """Collect nothing."""

    def __exit__(self, *_: object) -> None:
        pass


def build_recipe(folder: Path, arguments: argparse.Namespace, max_steps: int) -> dict[str, Any]:
    """Return a recipe that trains on random letters, without validation or intermediate saves."""
    letters = random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=8 * arguments.length)
    (folder / "corpus.txt").write_text("".join(letters) * arguments.rows)
    config = json.loads(arguments.config.read_text())
    return {
        "model": {
            "config": config,
            "compile": False if arguments.variant == "model.compile: false" else "auto",
        },
        "tokenizer": {"kind": "character"},
        "data": {"sources": str(folder / "corpus.txt"), "cache_dir": str(folder / "cache")},
        "precision": arguments.precision,
        "training": {
            "sequence_length": arguments.length,
            "micro_batch_size": arguments.rows,
            "max_steps": max_steps,
            "learning_rate": 1e-4,
        },
        "watchdog": {"enabled": False},
        "run": {"dir": str(folder / "run"), "device": arguments.device},
    }


if __name__ == "__main__":
    sys.exit(main())
