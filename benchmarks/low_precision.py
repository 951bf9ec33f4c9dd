"""Losses of a small Llama on real text in fp32, bf16, every 8-bit recipe and nvfp4, emulated.

    SHARDWRIGHT_DATA=/path/to/data python -m benchmarks.low_precision --publish

Trains on `text/tinyshakespeare.txt`, one process on one core, about twenty minutes. bf16 is
trained with three seeds: how far they are apart is the measure of the differences of the others,
which see the batches of the first seed; nvfp4 is trained with all three. `--publish` writes the
page, the curves and the numbers; `--render` writes the page and the curves from the published
numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any, get_args

import numpy as np

from benchmarks.conditions import format_rows, read_conditions
from shardwright.config.low_precision import FP8Recipe
from shardwright.config.recipe_loading import validate_recipe
from shardwright.report.line_chart import ChartFrame, Series, draw_curves
from shardwright.report.recorded_run import load_runs
from shardwright.report.run_comparison import compare_runs
from shardwright.telemetry.event_log import EvaluationEvent, StepEvent, read_events

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/benchmarks/low-precision-training.md"
NUMBERS = PAGE.with_suffix(".json")
LOSS_IMAGE = ROOT / "docs/images/low-precision-loss.svg"
DIFFERENCE_IMAGE = ROOT / "docs/images/low-precision-difference.svg"

NUM_STEPS = 300
NUM_LAST_STEPS = 50
"""Steps of which the final training loss is the mean."""
SEEDS = (1, 2, 3)
FP8_RECIPES: tuple[str, ...] = get_args(FP8Recipe)
MODEL = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
}
"""Every matrix of a block has whole blocks of 128 x 128."""
SECTIONS: dict[str, Any] = {
    "model": {"config": MODEL, "compile": False},
    "tokenizer": {"kind": "character"},
    "training": {
        "sequence_length": 128,
        "global_batch_size": 4,
        "micro_batch_size": 4,
        "learning_rate": 2e-3,
        "min_learning_rate": 2e-4,
        "schedule": "cosine",
        "warmup_steps": 40,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
    },
    "optimizer": {"name": "adamw", "beta2": 0.99},
    "evaluation": {"every_steps": 100, "micro_batch_size": 16, "max_batches": 16},
}


def main() -> None:
    """Train all runs and print or publish their losses."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.low_precision", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--publish", action="store_true", help="write page, curves and numbers")
    parser.add_argument("--render", action="store_true", help="train nothing; write the page")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--folder", type=Path, help="keep run folders here; skip those it has")
    options = parser.parse_args()
    if options.render:
        publish(json.loads(NUMBERS.read_text()))
        return
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(options.folder or Path(scratch), options.steps)
    print("\n".join(render_table(result)))
    if options.publish:
        NUMBERS.write_text(format_rows(result) + "\n")
        publish(result)


def list_runs() -> dict[str, tuple[int, Any]]:
    """Return seed and precision of every run, by its name."""
    runs: dict[str, tuple[int, Any]] = {"fp32": (SEEDS[0], "fp32")}
    runs |= {f"bf16 seed {seed}": (seed, "bf16") for seed in SEEDS}
    runs |= {
        f"fp8 {recipe}": (SEEDS[0], {"kind": "fp8", "fp8": {"recipe": recipe}})
        for recipe in FP8_RECIPES
    }
    nvfp4 = {"kind": "nvfp4", "nvfp4": {"experimental": True}}
    return runs | {f"nvfp4 seed {seed}": (seed, nvfp4) for seed in SEEDS}


def measure(folder: Path, num_steps: int) -> dict[str, Any]:
    """Train every run; return losses, seconds and differences."""
    from shardwright.training.run import train  # imports torch

    source = Path(os.environ["SHARDWRIGHT_DATA"]) / "text/tinyshakespeare.txt"
    runs = []
    for name, (seed, precision) in list_runs().items():
        recipe = validate_recipe(
            SECTIONS
            | {
                "seed": seed,
                "precision": precision,
                "data": {
                    "sources": str(source),
                    "validation_split": "tail",
                    "validation_fraction": 0.05,
                    "cache_dir": str(folder / "cache"),
                },
                "training": SECTIONS["training"] | {"max_steps": num_steps},
                "run": {"dir": str(folder / name.replace(" ", "-")), "device": "cpu"},
            }
        )
        run_folder = folder / name.replace(" ", "-")
        if not run_folder.exists():
            train(recipe)
        runs.append({"name": name, "seed": seed} | read_run(run_folder))
        print(f"{name}: {runs[-1]['final_loss']:.4f}, {runs[-1]['validation_loss']:.4f}")
    for run in runs:
        if run["name"] not in [f"bf16 seed {seed}" for seed in SEEDS[1:]]:
            run["difference"] = compare_with_bf16(folder, str(run["name"]), int(run["seed"]))
    return {"conditions": read_conditions(), "steps": num_steps, "runs": runs}


def read_run(folder: Path) -> dict[str, Any]:
    """Read a run's losses, and the largest fractions of flushed and numbers of saturated values."""
    events = list(read_events(folder / "events.jsonl"))
    steps = [event for event in events if isinstance(event, StepEvent)]
    evaluations = [event for event in events if isinstance(event, EvaluationEvent)]
    losses = [step.loss for step in steps]
    flushed = [value for step in steps for value in (step.fp8_flushed or {}).values()]
    saturated = [value for step in steps for value in (step.fp8_saturated or {}).values()]
    return {
        "final_loss": float(np.mean(losses[-NUM_LAST_STEPS:])),
        "validation_loss": evaluations[-1].loss,
        "largest_flushed": max(flushed, default=None),
        "num_saturated": sum(saturated) if saturated else None,
        "losses": [round(loss, 5) for loss in losses],
    }


def compare_with_bf16(folder: Path, name: str, seed: int) -> float:
    """Return the largest relative difference from bf16 of the same seed, as `compare` finds it."""
    names = (name, f"bf16 seed {seed}")
    run, reference = load_runs([folder / each.replace(" ", "-") for each in names])
    return abs(compare_runs(run, reference).worst.relative_difference)


def find_spread(result: dict[str, Any], field: str) -> tuple[float, float]:
    """Return the smallest and the largest final loss of bf16's seeds."""
    losses = [run[field] for run in result["runs"] if str(run["name"]).startswith("bf16")]
    return min(losses), max(losses)


def list_outside(result: dict[str, Any]) -> list[str]:
    """List the runs whose final loss is farther from bf16's of the same seed than its seeds lie
    apart."""
    outside = []
    references = {run["seed"]: run for run in result["runs"] if str(run["name"]).startswith("bf16")}
    for field in ("final_loss", "validation_loss"):
        low, high = find_spread(result, field)
        outside += [
            f"{run['name']} ({field})"
            for run in result["runs"]
            if not abs(run[field] - references[run["seed"]][field]) <= high - low
        ]
    return outside


def render_table(result: dict[str, Any]) -> list[str]:
    """Render the losses as rows of a Markdown table."""
    lines = [
        "| run | training loss | validation loss | difference | flushed | saturated |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for run in result["runs"]:
        difference = "" if "difference" not in run else f"{run['difference']:.2%}"
        flushed = "" if run["largest_flushed"] is None else f"{run['largest_flushed']:.2%}"
        saturated = "" if run["num_saturated"] is None else str(run["num_saturated"])
        lines.append(
            f"| {run['name']} | {run['final_loss']:.4f} | {run['validation_loss']:.4f} "
            f"| {difference} | {flushed} | {saturated} |"
        )
    return lines


def render_page(result: dict[str, Any]) -> str:
    """Render the published page."""
    conditions = result["conditions"]
    spreads = [find_spread(result, field) for field in ("final_loss", "validation_loss")]
    (low, high), (validation_low, validation_high) = spreads
    outside = list_outside(result)
    verdict = (
        "Every run differs from bf16 of the same seed by less than bf16's seeds differ from each "
        "other."
        if not outside
        else f"Farther from bf16 of the same seed than its seeds lie apart: {', '.join(outside)}."
    )
    return f"""# Losses in fp32, bf16, 8 and 4 bits

<!-- Written by `python -m benchmarks.low_precision --publish`; edit the script. -->

A Llama of {MODEL["num_hidden_layers"]} layers and width {MODEL["hidden_size"]} on
tinyshakespeare, characters as tokens, {result["steps"]} steps of 512 tokens. 8-bit and 4-bit
products are emulated, in both layers, and everything else is computed in bf16. Runs without a seed
in their names see the batches and the initial weights of the first seed.

    SHARDWRIGHT_DATA=/path/to/data python -m benchmarks.low_precision --publish

{chr(10).join(render_table(result))}

- Training loss: mean of the last {NUM_LAST_STEPS} steps. Validation loss: 256 rows that are not
  trained on.
- Difference: the largest from bf16 of the same seed, of means over windows of
  {max(25, result["steps"] // 10)} steps, as `shardwright compare` computes it.
- Flushed: largest fraction of a step's quantised elements that became zero, of one kind of layer.
  Saturated: elements of all steps that were clamped.

**{verdict}** The three seeds of bf16 span {low:.4f} to {high:.4f} in training and
{validation_low:.4f} to {validation_high:.4f} in validation.

![Training loss of all runs](../images/{LOSS_IMAGE.name})

![Relative difference of the training loss from bf16](../images/{DIFFERENCE_IMAGE.name})

Conditions: one process, one core of {conditions["processor"]}, torch
{conditions["packages"]["torch"]}, {conditions["date"]}. The model is small and the run is short;
larger ones are not measured.
"""


def smooth(values: np.ndarray[Any, Any], window: int = 25) -> np.ndarray[Any, Any]:
    """Return the mean of every full window."""
    return np.convolve(values, np.ones(window) / window, mode="valid")


def draw(result: dict[str, Any]) -> tuple[str, str]:
    """Draw the losses, and their relative differences from bf16 of the same seed."""
    losses = {run["name"]: np.array(run["losses"]) for run in result["runs"]}
    seeds = {run["name"]: run["seed"] for run in result["runs"]}
    curves = []
    differences = []
    for number, (name, values) in enumerate(losses.items()):
        smoothed = smooth(values)
        first = len(values) - len(smoothed) + 1
        steps = np.arange(first, len(values) + 1, dtype=np.float64)
        reference = losses[f"bf16 seed {seeds[name]}"]
        # Seeds of nvfp4 share a colour, as those of bf16 do.
        first_of_nvfp4 = len(losses) - len(SEEDS)
        colour = max(0, min(number, first_of_nvfp4) - len(SEEDS) + 1)
        style: Any = "dashed" if name.startswith("bf16") else "line"
        curves.append(Series(name, steps, smoothed, colour, style))
        if values is not reference:
            relative = 100 * smooth((values - reference) / reference)
            differences.append(Series(name, steps, relative, colour))
    frame = ChartFrame(y_label="training loss", labels="legend", height=400)
    title = "Training loss, mean over 25 steps"
    loss_image = draw_curves(curves, frame, title=title, is_standalone=True)
    frame = ChartFrame(y_label="percent", labels="legend", rules=((0.0, ""),), height=320)
    title = "Training loss against bf16 of the same seed, mean over 25 steps"
    return loss_image, draw_curves(differences, frame, title=title, is_standalone=True)


def publish(result: dict[str, Any]) -> None:
    """Write the page and its images."""
    PAGE.write_text(render_page(result))
    for path, image in zip((LOSS_IMAGE, DIFFERENCE_IMAGE), draw(result), strict=True):
        path.write_text(image)


if __name__ == "__main__":
    main()
