"""Tables of a plan: layouts, their memory and time by part, rejected layouts, and scaling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from shardwright.cli.output.console import open_console, print_table
from shardwright.planner.search.result import EQUAL_STEP_SHARE
from shardwright.planner.uncertainty import INTERVAL_SHARE, MIN_FIT_PROBABILITY, format_probability
from shardwright.units import GIB_BYTES, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from shardwright.config import Recipe
    from shardwright.hardware import Cluster
    from shardwright.planner.planning_result import PlanningResult
    from shardwright.planner.prediction import Prediction

_MEMORY_PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "gathered",
    "workspaces",
    "reserve",
)
_SHORT_NAMES = {
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "workspaces": "work",
    "tensor": "tp",
    "context": "cp",
}
_SHORT_NAMES |= {"expert": "ep", "pipeline": "pp", "overhead": "other", "imbalance": "uneven"}
_TIME_PARTS = (
    "compute",
    "tensor",
    "context",
    "expert",
    "pipeline",
    "data",
    "bubble",
    "imbalance",
    "offload",
    "optimizer",
    "reference",
    "overhead",
)
_HIDDEN_PARTS = (
    "hidden_tensor",
    "hidden_context",
    "hidden_expert",
    "hidden_pipeline",
    "hidden_data",
)


def print_plan(
    result: PlanningResult,
    recipe: Recipe,
    cluster: Cluster,
    *,
    num_layouts: int,
    seconds: float,
    corrections: Sequence[str] = (),
) -> None:
    """Print the complete result.

    Args:
        corrections: lines about what corrects the predictions: measured step times, rows of the
            data, loads of experts.
    """
    console = open_console()
    shown = result.predictions or ((result.recipe_prediction,) if result.recipe_prediction else ())
    template = shown[0].candidate if shown else None
    batch = recipe.training.global_batch_size
    length = recipe.training.sequence_length
    headline = f"{recipe.name} on {cluster.name}: {length:,} tokens per sequence"
    headline += f", {batch:,} sequences per step" if batch else ""
    headline += f", {template.precision}" if template is not None else ""
    if result.precision_reason is not None:
        headline += f" (precision auto: {result.precision_reason})"
    if template is not None and template.adapter is not None:
        headline += f", LoRA rank {template.adapter.rank}" + (
            " on NF4" if template.adapter.quantised else ""
        )
    console.print(headline)
    if cluster.profile is not None:
        console.print(f"rates {cluster.rates_source}; data sheets for all others")
    for line in corrections:
        console.print(line)
    if result.predictions:
        _print_layouts(console, result, recipe)
        _print_parts(
            console, result, "memory per GPU, GiB", [*_MEMORY_PARTS, "total"], _build_memory_row
        )
        _print_parts(
            console, result, "time per step, seconds", _list_time_columns(result), _build_time_row
        )
    if result.recompute_choice is not None:
        layout = "chosen" if recipe.layout.auto else "recipe's"
        console.print(f"\nrecompute of the {layout} layout: {result.recompute_choice.describe()}")
    if result.recipe_conflict is not None:
        console.print(f"\nthe recipe's own layout is not possible: {result.recipe_conflict}")
    if result.rejections:
        _print_rejections(console, result)
    if result.scale_points:
        _print_scaling(console, result)
    if result.explanation:
        console.print("\nwhy", style="bold")
        for sentence in result.explanation:
            console.print(f"- {sentence}")
    effort = result.effort
    first = min(effort.num_proven, num_layouts)
    proven = ""
    if first > 1:
        proven = f"the first {first} are proven to be the fastest; "
    elif first:
        proven = "the first is proven to be the fastest; "
    console.print(
        f"\n{effort.num_predicted:,} layouts predicted, "
        f"{effort.num_too_large:,} excluded by a lower bound on their memory; "
        f"{proven}{format_seconds(seconds)}",
        style="dim",
    )


def _print_layouts(console: Console, result: PlanningResult, recipe: Recipe) -> None:
    steps = recipe.training.max_steps
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title="layouts that fit, fastest first",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("", justify="right")
    table.add_column("layout", overflow="fold", ratio=1)
    table.add_column("batch", justify="right")
    table.add_column("recompute")
    for name in ("tok/s", "MFU", "step", "GiB", "fits"):
        table.add_column(name, justify="right", no_wrap=True)
    if steps is not None:
        table.add_column("days", justify="right", no_wrap=True)
        table.add_column("GPU-h", justify="right", no_wrap=True)
    for number, prediction in _number_layouts(result):
        style = "bold green" if prediction is result.chosen else None if prediction.fits else "red"
        if len(result.alternatives) > 1 and any(prediction is p for p in result.alternatives):
            number += "~"
        if prediction.is_measured:
            number += "#"
        table.add_row(*_build_layout_row(number, prediction, steps), style=style)
    console.print()
    print_table(console, table)
    if result.chosen is not None:
        _print_choice(console, result, result.chosen)
    console.print("batch: micro-batch x accumulation")
    if result.recipe_prediction is not None:
        text = "the recipe's own layout"
        if not result.recipe_prediction.fits:
            text += ", which does not fit"
            if recipe.training.micro_batch_size is None:
                text += ": it sets no training.micro_batch_size"
        console.print(f"=: {text}")
    if len(result.alternatives) > 1:
        console.print(
            f"~: indistinguishable from the fastest recommendable layout (within "
            f"{EQUAL_STEP_SHARE:.0%})"
        )
    if any(prediction.is_measured for _, prediction in _number_layouts(result)):
        console.print("#: step time measured by `tune` on this hardware")
    if any(prediction.is_tight for _, prediction in _number_layouts(result)):
        console.print(
            f"!: tight: fits as predicted, but with a probability below {MIN_FIT_PROBABILITY:.0%}"
        )
    if result.product_rates is not None:
        console.print(
            f"{result.product_rates}. What `train` emulates is far slower (docs/low-precision.md)"
        )
    if result.missing_kernels is not None:
        console.print(f"warning: {result.missing_kernels}", style="yellow")
    for omission in result.omissions:
        console.print(omission)
    if any(not prediction.candidate.is_runnable for prediction in result.predictions):
        console.print("*: prediction only; `train` does not support it")


def _print_choice(console: Console, result: PlanningResult, chosen: Prediction) -> None:
    """Print the chosen layout with the reason, its intervals, and the warning if it is tight."""
    reason = f": {result.choice_reason}" if result.choice_reason else ""
    if len(result.alternatives) > 1:
        reason += " (~)"
    console.print(f"chosen: {chosen.candidate.describe()}{reason}", style="green")
    if chosen.warning is not None:
        console.print(f"warning: the chosen layout {chosen.warning}", style="yellow")
    step = " to ".join(map(format_seconds, chosen.step_interval))
    memory = " to ".join(f"{end / GIB_BYTES:.1f}" for end in chosen.memory_interval)
    console.print(
        f"its {INTERVAL_SHARE:.0%} intervals: step {step}, memory {memory} GiB "
        f"({result.uncertainty.evidence})"
    )


def _number_layouts(result: PlanningResult) -> list[tuple[str, Prediction]]:
    """Number the layouts: `+` is the chosen one if it is not in the list, `=` the recipe's
    own."""
    rows = [(str(number), prediction) for number, prediction in enumerate(result.predictions, 1)]
    if result.chosen is not None and not any(
        prediction is result.chosen for prediction in result.predictions
    ):
        rows.append(("+", result.chosen))
    return rows + (
        [("=", result.recipe_prediction)] if result.recipe_prediction is not None else []
    )


def _build_layout_row(number: str, prediction: Prediction, steps: int | None) -> list[str]:
    candidate = prediction.candidate
    batch = f"{candidate.micro_batch_size} x {candidate.gradient_accumulation_steps}"
    name = candidate.describe() + ("" if candidate.is_runnable else " *")
    cells = [number, name, batch, candidate.recompute]
    cells += [
        format_count(prediction.tokens_per_second),
        f"{prediction.model_flops_utilisation:.1%}",
    ]
    cells += [format_seconds(prediction.time.step), f"{prediction.memory.total / GIB_BYTES:.1f}"]
    cells.append(
        format_probability(prediction.fit_probability) + ("!" if prediction.is_tight else "")
    )
    if steps is not None:
        cells += [
            _format_days(prediction.compute_days(steps)),
            format_count(prediction.compute_gpu_hours(steps)),
        ]
    return cells


def _format_days(days: float) -> str:
    """Format with three digits, or all before the decimal point.

    >>> _format_days(2403.4), _format_days(58.44)
    ('2,403', '58.4')
    """
    return f"{days:.3g}" if days < 100 else f"{days:,.0f}"


def _print_parts(
    console: Console, result: PlanningResult, title: str, columns: list[str], build_row: object
) -> None:
    assert callable(build_row)
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    table.add_column("", justify="right")
    for column in columns:
        table.add_column(_SHORT_NAMES.get(column, column), justify="right", no_wrap=True)
    for number, prediction in _number_layouts(result):
        table.add_row(
            number,
            *build_row(prediction, columns),
            style="bold green" if prediction is result.chosen else None,
        )
    console.print()
    print_table(console, table)


def _build_memory_row(prediction: Prediction, columns: list[str]) -> list[str]:
    memory = prediction.memory
    values = {name: float(getattr(memory, name)) for name in columns}
    values["workspaces"] += memory.driver  # shown together: both are overhead
    return [f"{values[name] / GIB_BYTES:.1f}" for name in columns]


def _list_time_columns(result: PlanningResult) -> list[str]:
    """Return the parts that take time in at least one of the layouts."""
    predictions = [
        *result.predictions,
        *([result.recipe_prediction] if result.recipe_prediction else []),
    ]
    names = [
        name
        for name in _TIME_PARTS
        if any(getattr(prediction.time, name) > 5e-4 for prediction in predictions)
    ]
    return [*names, "hidden"]


def _build_time_row(prediction: Prediction, columns: list[str]) -> list[str]:
    values = {name: float(getattr(prediction.time, name)) for name in columns if name != "hidden"}
    values["hidden"] = sum(getattr(prediction.time, name) for name in _HIDDEN_PARTS)
    return [f"{values[name]:.3g}" if values[name] >= 5e-4 else "-" for name in columns]


def _print_rejections(console: Console, result: PlanningResult) -> None:
    console.print("\nrejected", style="bold")
    for rejection in result.rejections:
        console.print(f"- {rejection.name}: {rejection.reason}")
        if rejection.changed_prediction is not None:
            changed = rejection.changed_prediction
            size = format_bytes(changed.memory.total)
            speed = format_count(changed.tokens_per_second)
            console.print(f"    fits with {rejection.change}: {size}, {speed} tokens/s")
        elif rejection.needed_bytes is not None:
            console.print(
                "    does not fit with any recompute, micro-batch size, zero_stage or offload"
            )


def _print_scaling(console: Console, result: PlanningResult) -> None:
    from shardwright.planner.scaling import find_flattening

    table = Table(
        box=None,
        pad_edge=False,
        title="scaling at the same global batch",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("GPUs", justify="right")
    table.add_column("layout", overflow="fold", ratio=1)
    for name in ("tok/s", "per GPU", "efficiency", "MFU"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in result.scale_points:
        prediction = point.prediction
        if prediction is None or point.efficiency is None:
            table.add_row(str(point.num_gpus), "no layout fits", "", "", "", "")
            continue
        table.add_row(
            f"{point.num_gpus:,}",
            prediction.candidate.describe(),
            format_count(prediction.tokens_per_second),
            f"{prediction.tokens_per_second_per_gpu:,.0f}",
            f"{point.efficiency:.0%}",
            f"{prediction.model_flops_utilisation:.1%}",
        )
    console.print()
    print_table(console, table)
    limit = find_flattening(list(result.scale_points))
    if limit is not None:
        console.print(
            f"scaling is poor beyond {limit:,} GPUs: more yield less than half of the ideal speedup"
        )
