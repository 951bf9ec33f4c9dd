"""Losses of a small Llama with weights and moments in fp32, and in bf16 with two roundings.

    SHARDWRIGHT_DATA=/path/to/data python -m benchmarks.bf16_weights --folder /tmp/runs --publish

Trains the model of `benchmarks.low_precision` on the same text. Products are computed in fp32 in
all runs, so that only the precision of what is stored differs; without units for bf16 they are
also much faster. Runs that have finished are kept in the folder; a second start trains the others.
`--publish` writes the page and its numbers.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from benchmarks.conditions import format_rows, read_conditions
from benchmarks.low_precision_runs import (
    MODEL,
    NUM_LAST_STEPS,
    NUM_STEPS,
    SEEDS,
    TrainingRun,
    read_run,
    write_recipe,
)

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/benchmarks/bf16-weights.md"
NUMBERS = PAGE.with_suffix(".json")
ROUNDINGS = ("fp32", "bf16, stochastic", "bf16, nearest")
RATES = {"2e-3 to 2e-4": (2e-3, 2e-4), "1e-4 to 1e-5": (1e-4, 1e-5)}
"""First and last learning rate. The second is one of fine-tuning."""


class Run(NamedTuple):
    """A run of the benchmark."""

    rounding: str
    rate: str
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return f"{self.rounding} {self.rate} seed {self.seed}".replace(", ", "-").replace(" ", "-")


@contextmanager
def compute_in_fp32() -> Iterator[None]:
    """Multiply in fp32 in runs of `kind: bf16`."""
    import torch

    from shardwright.numerics import precision

    with mock.patch.dict(precision._COMPUTE_DTYPES, {"bf16": torch.float32}):
        yield


@contextmanager
def round_to_nearest() -> Iterator[None]:
    """Round new weights and moments to the nearest number of bf16."""
    import torch

    from shardwright.optim import bf16_updates

    with mock.patch.object(
        bf16_updates, "round_to_bf16", lambda values, _bits: values.to(torch.bfloat16)
    ):
        yield


def list_runs(seeds: Sequence[int]) -> list[Run]:
    """List all runs, seed by seed."""
    return [Run(rounding, rate, seed) for seed in seeds for rate in RATES for rounding in ROUNDINGS]


def train_run(folder: Path, run: Run, num_steps: int) -> dict[str, Any]:
    """Train a run and return its losses."""
    from shardwright.training.run import train  # imports torch

    is_fp32 = run.rounding == "fp32"
    section = {"kind": "bf16", "master_weights": "fp32" if is_fp32 else "bf16"}
    recipe = write_recipe(folder, TrainingRun(run.name, run.seed, section), num_steps)
    first, last = RATES[run.rate]
    path = folder / run.name
    shutil.rmtree(path, ignore_errors=True)  # of an interrupted run
    recipe = recipe.model_copy(
        update={
            "training": recipe.training.model_copy(
                update={"learning_rate": first, "min_learning_rate": last}
            ),
            "run": recipe.run.model_copy(update={"dir": str(path)}),
        }
    )
    with compute_in_fp32(), round_to_nearest() if "nearest" in run.rounding else nullcontext():
        train(recipe)
    row = read_run(path)
    losses = row["losses"]
    return {
        **run._asdict(),
        "final_loss": row["final_loss"],
        "validation_loss": row["validation_loss"],
        "losses": losses,
    }


def measure(folder: Path, num_steps: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Train every run that the folder has no result of; return all losses."""
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "runs.json"
    rows: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    for run in list_runs(seeds):
        if run.name not in rows:
            rows[run.name] = train_run(folder, run, num_steps)
            results.write_text(format_rows(rows) + "\n")
        print(f"{run.name}: {rows[run.name]['final_loss']:.4f}", flush=True)
    return {
        "conditions": read_conditions(),
        "steps": num_steps,
        "seeds": list(seeds),
        "runs": [rows[run.name] for run in list_runs(seeds)],
    }


def render_table(result: dict[str, Any], rate: str, field: str) -> str:
    """Render the losses of one schedule as a Markdown table."""
    rows = [row for row in result["runs"] if row["rate"] == rate]
    losses = {
        rounding: [row[field] for row in rows if row["rounding"] == rounding]
        for rounding in ROUNDINGS
    }
    seeds = ", ".join(map(str, result["seeds"]))
    lines = [
        f"| stored in | seed {seeds} | minus fp32 of the same seed |",
        "| --- | ---: | ---: |",
    ]
    for rounding, each in losses.items():
        differences = np.subtract(each, losses["fp32"])
        values = ", ".join(f"{loss:.4f}" for loss in each)
        more = ", ".join(f"{difference:+.4f}" for difference in differences)
        lines.append(f"| {rounding} | {values} | {'' if rounding == 'fp32' else more} |")
    return "\n".join(lines)


def render_page(result: dict[str, Any]) -> str:
    """Render the published page."""
    conditions = result["conditions"]
    parts = [
        f"""## Learning rate {rate}

Training loss, mean of the last {NUM_LAST_STEPS} steps:

{render_table(result, rate, "final_loss")}

Validation loss, 256 rows that are not trained on:

{render_table(result, rate, "validation_loss")}
"""
        for rate in RATES
    ]
    return f"""# Losses with weights, gradients and moments in bf16

<!-- Written by `python -m benchmarks.bf16_weights --publish`; edit the script. -->

`precision.master_weights: bf16` stores weights, gradients and AdamW's moments in bf16 and rounds
new weights and moments stochastically. Here it is compared with fp32, and with rounding to
nearest, which shardwright does not offer. A Llama of {MODEL["num_hidden_layers"]} layers and width
{MODEL["hidden_size"]} on tinyshakespeare, characters as tokens, {result["steps"]} steps of 512
tokens, cosine schedule, beta2 0.99. Products are computed in fp32 in all runs, so only the
precision of what is stored differs. Runs of one seed see the same batches.

    SHARDWRIGHT_DATA=/path/to/data python -m benchmarks.bf16_weights --folder /tmp/runs \\
        --seeds {" ".join(map(str, result["seeds"]))} --publish

{chr(10).join(parts)}
Conditions: one process on {conditions["processor"]}, torch {conditions["packages"]["torch"]},
{conditions["date"]}.
Seeds of bf16 lie up to 0.014 apart on this model with the first schedule
([measured](low-precision-training.md)). The model is small and the runs are short; larger ones are
not measured.
"""


def main() -> None:
    """Train all runs and print or publish their losses."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bf16_weights", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--publish", action="store_true", help="write the page and its numbers")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the runs")
    options = parser.parse_args()
    result = measure(options.folder, options.steps, options.seeds)
    print(render_page(result))
    if options.publish:
        NUMBERS.write_text(format_rows(result) + "\n")
        PAGE.write_text(render_page(result))


if __name__ == "__main__":
    main()
