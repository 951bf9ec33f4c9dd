"""Losses of a small Llama on real text in fp32, bf16, every 8-bit recipe and nvfp4, emulated.

    SHARDWRIGHT_DATA=/path/to/data python -m benchmarks.low_precision --publish

Trains on `text/tinyshakespeare.txt`, one process on one core, about fifty minutes. Every precision
is trained with the same three seeds and compared with bf16 of the same seed. bf16 is trained with
more seeds: how far they are apart is the measure of these differences. A larger model is trained in
three of the precisions. With `--folder`, runs that
have finished are kept in `runs.json` there, and a second start trains the others. `--publish`
writes the page, the curves and the numbers; `--render` writes the page and the curves from the
published numbers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conditions import format_rows
from benchmarks.low_precision_runs import (
    BF16_SEEDS,
    LARGER_MODEL,
    MODEL,
    NUM_LAST_STEPS,
    NUM_STEPS,
    SEEDS,
    measure,
)
from shardwright.report.line_chart import GREY, NUM_COLOURS, ChartFrame, Series, draw_curves

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/benchmarks/low-precision-training.md"
NUMBERS = PAGE.with_suffix(".json")
LOSS_IMAGE = ROOT / "docs/images/low-precision-loss.svg"
DIFFERENCE_IMAGE = ROOT / "docs/images/low-precision-difference.svg"

T_OF_95_PERCENT = 4.303
"""Quantile of Student's t with two degrees of freedom, for a two-sided interval of three seeds."""
FIELDS = {"final_loss": "training", "validation_loss": "validation"}


def main() -> None:
    """Train all runs and print or publish their losses."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.low_precision", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--publish", action="store_true", help="write page, curves and numbers")
    parser.add_argument("--render", action="store_true", help="train nothing; write the page")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--folder", type=Path, help="keep runs here; skip finished ones")
    options = parser.parse_args()
    if options.render:
        publish(json.loads(NUMBERS.read_text()))
        return
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(options.folder or Path(scratch), options.steps)
    print(render_page(result))
    if options.publish:
        NUMBERS.write_text(format_rows(result) + "\n")
        publish(result)


Runs = dict[str, dict[int, dict[str, Any]]]
"""Runs by precision and seed."""


def sort_runs(result: dict[str, Any], key: str = "runs") -> Runs:
    """Sort the runs, or the `larger_runs`, by precision, in the order of the page."""
    runs: Runs = {}
    for run in result[key]:
        runs.setdefault(run["precision"], {})[run["seed"]] = run
    return runs


def find_spread(runs: Runs, field: str, seeds: Sequence[int]) -> tuple[float, float]:
    """Return the smallest and the largest final loss of bf16's seeds."""
    losses = [runs["bf16"][seed][field] for seed in seeds]
    return min(losses), max(losses)


def list_differences(runs: Runs, precision: str, field: str) -> list[float]:
    """List the differences of final losses from bf16 of the same seed."""
    return [runs[precision][seed][field] - runs["bf16"][seed][field] for seed in SEEDS]


def compute_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the seeds' differences, and half of its 95% interval (Student's t)."""
    half = T_OF_95_PERCENT * np.std(differences, ddof=1) / len(differences) ** 0.5
    return float(np.mean(differences)), float(half)


def list_outside(runs: Runs, seeds: Sequence[int]) -> list[str]:
    """List the runs whose final loss is farther from bf16's of the same seed than these seeds of
    bf16 lie apart."""
    outside = []
    for field, noun in FIELDS.items():
        low, high = find_spread(runs, field, seeds)
        for precision in runs:
            differences = list_differences(runs, precision, field)
            outside += [
                f"{precision} seed {seed} ({noun})"
                for seed, difference in zip(SEEDS, differences, strict=True)
                if not abs(difference) <= high - low
            ]
    return outside


def list_distinct(runs: Runs) -> list[str]:
    """List the precisions whose mean difference from bf16 has an interval without zero."""
    distinct = []
    for field, noun in FIELDS.items():
        for precision in runs:
            mean, half = compute_interval(list_differences(runs, precision, field))
            if not abs(mean) <= half:
                distinct.append(f"{precision} ({noun}, {mean:+.4f})")
    return distinct


def render_losses(runs: Runs, field: str) -> list[str]:
    """Render final losses and their differences from bf16 as rows of a Markdown table."""
    lines = [
        "| precision | seeds 1, 2, 3 | minus bf16 of the same seed | mean difference |",
        "| --- | ---: | ---: | ---: |",
    ]
    for precision, by_seed in runs.items():
        losses = ", ".join(f"{by_seed[seed][field]:.4f}" for seed in SEEDS)
        if precision == "bf16":
            lines.append(f"| bf16 | {losses} | | |")
            continue
        differences = list_differences(runs, precision, field)
        mean, half = compute_interval(differences)
        each = ", ".join(f"{difference:+.4f}" for difference in differences)
        lines.append(f"| {precision} | {losses} | {each} | {mean:+.4f} ± {half:.4f} |")
    return lines


def render_rounding(runs: Runs) -> list[str]:
    """Render the largest difference of a curve, and the counts of rounding."""
    lines = ["| precision | difference | flushed | saturated |", "| --- | ---: | ---: | ---: |"]
    for precision, by_seed in runs.items():
        if precision == "bf16":
            continue
        difference = max(run["difference"] for run in by_seed.values())
        flushed = [run["largest_flushed"] for run in by_seed.values()]
        saturated = [run["num_saturated"] for run in by_seed.values()]
        counts = " | " if None in flushed else f"{max(flushed):.2%} | {sum(saturated)}"
        lines.append(f"| {precision} | {difference:.2%} | {counts} |")
    return lines


def render_page(result: dict[str, Any]) -> str:
    """Render the published page."""
    conditions = result["conditions"]
    runs = sort_runs(result)
    spreads = []
    for field, noun in FIELDS.items():
        low, high = find_spread(runs, field, SEEDS)
        all_low, all_high = find_spread(runs, field, BF16_SEEDS)
        deviation = np.std([runs["bf16"][seed][field] for seed in BF16_SEEDS], ddof=1)
        spreads.append(
            f"- {noun}: three seeds {low:.4f} to {high:.4f}, {high - low:.4f} apart; "
            f"{len(BF16_SEEDS)} seeds\n  {all_low:.4f} to {all_high:.4f}, {all_high - all_low:.4f} "
            f"apart, with a standard deviation of {deviation:.4f}."
        )
    outside, far_outside = (
        ", ".join(list_outside(runs, seeds)) or "none" for seeds in (SEEDS, BF16_SEEDS)
    )
    distinct = ", ".join(list_distinct(runs)) or "none"
    larger = sort_runs(result, "larger_runs")
    larger_distinct = ", ".join(list_distinct(larger)) or "none"
    return f"""# Losses in fp32, bf16, 8 and 4 bits

<!-- Written by `python -m benchmarks.low_precision --publish`; edit the script. -->

A Llama of {MODEL["num_hidden_layers"]} layers and width {MODEL["hidden_size"]} on
tinyshakespeare, characters as tokens, {result["steps"]} steps of 512 tokens. 8-bit and 4-bit
products are emulated, in both layers, and everything else is computed in bf16. Runs of one seed see
the same batches and begin with the same weights.

    SHARDWRIGHT_DATA=/path/to/data python -m benchmarks.low_precision --publish

How far seeds of bf16 are apart:

{chr(10).join(spreads)}

Training loss, mean of the last {NUM_LAST_STEPS} steps:

{chr(10).join(render_losses(runs, "final_loss"))}

Validation loss, 256 rows that are not trained on:

{chr(10).join(render_losses(runs, "validation_loss"))}

The mean difference has its 95% interval, by Student's t for three pairs.

- **Runs farther from bf16 of the same seed than bf16's three seeds lie apart**: {outside}.
  Than its {len(BF16_SEEDS)} seeds: {far_outside}.
- **Precisions whose interval is without zero**: {distinct}. If no precision
  mattered, about one of these {2 * len(runs) - 2} intervals would be so by chance.
- **`rowwise_with_gw_hp` is torchao's recipe of this name**: outputs and gradients of its products
  equal those of torchao 0.18's emulation, bit by bit, on the same inputs
  (`tests/unit/model/test_fp8_against_torchao.py`).
  [Variants of it](../decisions/0179-gathers-of-each-pass.md#losses-of-rowwise_with_gw_hp) show no
  single cast that causes its difference.
  torchao can compute a recipe with fp32 scales (`round_scales_to_power_of_2`); its recipes of rows
  do not, and [neither does ours](../decisions/0178-losses-of-a-larger-model.md#scales-of-fp32).

{chr(10).join(render_rounding(runs))}

- Difference: the largest from bf16 of the same seed, of means over windows of
  {max(25, result["steps"] // 10)} steps, as `shardwright compare` computes it, of any seed.
- Flushed: largest fraction of a step's quantised elements that became zero, of one kind of layer.
  Saturated: elements of all steps that were clamped.
- `nvfp4` rounds gradients stochastically, `nvfp4 nearest` to nearest.

![Training loss, mean over three seeds](../images/{LOSS_IMAGE.name})

![Relative difference of the training loss from bf16](../images/{DIFFERENCE_IMAGE.name})

## A larger model

{LARGER_MODEL["num_hidden_layers"]} layers and width {LARGER_MODEL["hidden_size"]}, steps of 256
tokens; everything else as above. It checks whether the difference of `rowwise_with_gw_hp` shrinks.
Models, precisions and seeds were
[chosen before a run had ended](../decisions/0178-losses-of-a-larger-model.md).

Training loss, mean of the last {NUM_LAST_STEPS} steps:

{chr(10).join(render_losses(larger, "final_loss"))}

Validation loss:

{chr(10).join(render_losses(larger, "validation_loss"))}

{chr(10).join(render_rounding(larger))}

Precisions whose interval is without zero: {larger_distinct}. Three seeds do not distinguish a
difference as small as that of the smaller model from none.

Conditions: one process, one core of {conditions["processor"]}, torch
{conditions["packages"]["torch"]}, {conditions["date"]}. Another processor sums in another order, so
losses differ there, also in bf16. Both models are small and the runs are short; larger ones
are not measured.
"""


def smooth(values: np.ndarray[Any, Any], window: int = 25) -> np.ndarray[Any, Any]:
    """Return the mean of every full window."""
    return np.convolve(values, np.ones(window) / window, mode="valid")


def draw(result: dict[str, Any]) -> tuple[str, str]:
    """Draw the losses, and their relative differences from bf16 of the same seed; each curve is the
    mean over the seeds of all precisions."""
    curves = []
    differences = []
    bf16_losses: list[np.ndarray[Any, Any]] = []
    for number, (precision, by_seed) in enumerate(sort_runs(result).items()):
        losses = [np.array(by_seed[seed]["losses"]) for seed in SEEDS]
        bf16_losses = bf16_losses or losses
        smoothed = smooth(np.mean(losses, axis=0))
        num_steps = len(losses[0])
        steps = np.arange(num_steps - len(smoothed) + 1, num_steps + 1, dtype=np.float64)
        # The first two are grey; the last two, both nvfp4, share a colour.
        colour = GREY if number < 2 else min(number - 2, NUM_COLOURS - 1)
        is_dashed = precision in ("bf16", "nvfp4 nearest")
        style: Any = "dashed" if is_dashed else "line"
        label = f"{precision} (dashed)" if is_dashed else precision
        curves.append(Series(label, steps, smoothed, colour, style))
        if number:
            pairs = zip(losses, bf16_losses, strict=True)
            relative = 100 * smooth(np.mean([(a - b) / b for a, b in pairs], axis=0))
            differences.append(Series(label, steps, relative, colour, style))
    frame = ChartFrame(y_label="training loss", labels="legend", height=400)
    title = "Training loss, mean over 25 steps and three seeds"
    loss_image = draw_curves(curves, frame, title=title, is_standalone=True)
    frame = ChartFrame(y_label="percent", labels="legend", rules=((0.0, ""),), height=320)
    title = "Training loss against bf16 of the same seed, mean over 25 steps and three seeds"
    return loss_image, draw_curves(differences, frame, title=title, is_standalone=True)


def publish(result: dict[str, Any]) -> None:
    """Write the page and its images."""
    PAGE.write_text(render_page(result))
    for path, image in zip((LOSS_IMAGE, DIFFERENCE_IMAGE), draw(result), strict=True):
        path.write_text(image)


if __name__ == "__main__":
    main()
