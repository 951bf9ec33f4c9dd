"""Tables of a plan: layouts, their memory and time by part, rejected layouts, and scaling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from shardwright.cli.console import open_console
from shardwright.planner.prediction import MEMORY_ERROR_SHARE
from shardwright.units import GIB_BYTES, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from shardwright.config import Recipe
    from shardwright.hardware import Cluster
    from shardwright.planner.answer import Answer
    from shardwright.planner.prediction import Prediction

_MEMORY = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "gathered",
    "workspaces",
    "reserve",
)
_SHORT = {
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "workspaces": "work",
    "tensor": "tp",
    "context": "cp",
}
_SHORT |= {"expert": "ep", "pipeline": "pp", "overhead": "other"}
_TIME = (
    "compute",
    "tensor",
    "context",
    "expert",
    "pipeline",
    "data",
    "bubble",
    "optimizer",
    "reference",
    "overhead",
)
_HIDDEN = ("hidden_tensor", "hidden_context", "hidden_expert", "hidden_pipeline", "hidden_data")


def show(
    found: Answer,
    recipe: Recipe,
    cluster: Cluster,
    *,
    top: int,
    seconds: float,
    console: Console | None = None,
) -> None:
    """Print the complete result."""
    console = console or open_console()
    shown = found.layouts or ((found.stated,) if found.stated else ())
    template = shown[0].candidate if shown else None
    batch = recipe.training.global_batch_size
    length = recipe.training.sequence_length
    headline = f"{recipe.name} on {cluster.name}: {length:,} tokens per sequence"
    headline += f", {batch:,} sequences per step" if batch else ""
    headline += f", {template.precision}" if template is not None else ""
    if found.precision_reason is not None:
        headline += f" (precision auto: {found.precision_reason})"
    if template is not None and template.adapter is not None:
        headline += f", LoRA rank {template.adapter.rank}" + (
            " on NF4" if template.adapter.quantised else ""
        )
    console.print(headline, highlight=False)
    if cluster.profile is not None:
        console.print(f"rates {cluster.rates}; data sheets for all others", highlight=False)
    if found.layouts:
        _show_layouts(console, found, recipe)
        _show_parts(console, found, "memory per GPU, GiB", _memory_columns(found), _memory_row)
        _show_parts(console, found, "time per step, seconds", _time_columns(found), _time_row)
    if found.impossible is not None:
        console.print(
            f"\nthe recipe's own layout is not possible: {found.impossible}", highlight=False
        )
    if found.rejections:
        _show_rejections(console, found)
    if found.points:
        _show_growth(console, found)
    if found.sentences:
        console.print("\nwhy", style="bold")
        for sentence in found.sentences:
            console.print(f"- {sentence}", highlight=False)
    effort = found.effort
    first = min(effort.num_proven, top)
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
        highlight=False,
    )


def _show_layouts(console: Console, found: Answer, recipe: Recipe) -> None:
    steps = recipe.training.max_steps
    table = Table(
        box=None,
        pad_edge=False,
        title="layouts that fit, fastest first",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("", justify="right")
    table.add_column("layout", overflow="fold", ratio=1)
    table.add_column("batch", justify="right")
    table.add_column("recompute")
    for name in ("tok/s", "MFU", "step", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    if steps is not None:
        table.add_column("days", justify="right", no_wrap=True)
        table.add_column("GPU-h", justify="right", no_wrap=True)
    for number, prediction in _numbered(found):
        style = "bold green" if prediction is found.chosen else None if prediction.fits else "red"
        table.add_row(*_layout_row(number, prediction, steps), style=style)
    console.print()
    console.print(table)
    if found.chosen is not None:
        chosen = found.chosen
        reason = (
            ""
            if chosen is found.layouts[0]
            else ": fewest shards among those within 3% of the fastest"
        )
        if found.is_chosen_for_room:
            reason = (
                f": the best that fits with {MEMORY_ERROR_SHARE:.0%} more memory than predicted"
            )
        console.print(
            f"chosen: {chosen.candidate.describe()}{reason}", style="green", highlight=False
        )
        if chosen.warning is not None:
            console.print(
                f"warning: the chosen layout {chosen.warning}", style="yellow", highlight=False
            )
    if found.stated is not None:
        text = "the recipe's own layout" + ("" if found.stated.fits else ", which does not fit")
        console.print(f"=: {text}", highlight=False)
    if any(prediction.is_tight for _, prediction in _numbered(found)):
        text = f"tight: fits, but not with {MEMORY_ERROR_SHARE:.0%} more memory than predicted"
        console.print(text, highlight=False)
    if any(not prediction.candidate.runnable for prediction in found.layouts):
        console.print("*: prediction only; `train` does not support it", highlight=False)


def _numbered(found: Answer) -> list[tuple[str, Prediction]]:
    """Number the layouts: `+` is the chosen one if it is not in the list, `=` the recipe's
    own."""
    rows = [(str(number), prediction) for number, prediction in enumerate(found.layouts, 1)]
    if found.chosen is not None and not any(
        prediction is found.chosen for prediction in found.layouts
    ):
        rows.append(("+", found.chosen))
    return rows + ([("=", found.stated)] if found.stated is not None else [])


def _layout_row(number: str, prediction: Prediction, steps: int | None) -> list[str]:
    candidate = prediction.candidate
    batch = f"{candidate.micro_batch_size} x {candidate.gradient_accumulation_steps}"
    cells = [number, candidate.describe() + _mark(prediction), batch, candidate.recompute]
    cells += [
        format_count(prediction.tokens_per_second),
        f"{prediction.model_flops_utilisation:.1%}",
    ]
    cells += [format_seconds(prediction.time.step), f"{prediction.memory.total / GIB_BYTES:.1f}"]
    if steps is not None:
        cells += [f"{prediction.days(steps):.3g}", format_count(prediction.gpu_hours(steps))]
    return cells


def _mark(prediction: Prediction) -> str:
    return ("" if prediction.candidate.runnable else " *") + (
        " (tight)" if prediction.is_tight else ""
    )


def _show_parts(
    console: Console, found: Answer, title: str, columns: list[str], row: object
) -> None:
    assert callable(row)
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    table.add_column("", justify="right")
    for column in columns:
        table.add_column(_SHORT.get(column, column), justify="right", no_wrap=True)
    for number, prediction in _numbered(found):
        table.add_row(
            number,
            *row(prediction, columns),
            style="bold green" if prediction is found.chosen else None,
        )
    console.print()
    console.print(table)


def _memory_columns(found: Answer) -> list[str]:
    return [*_MEMORY, "total"]


def _memory_row(prediction: Prediction, columns: list[str]) -> list[str]:
    memory = prediction.memory
    values = {name: float(getattr(memory, name)) for name in columns}
    values["workspaces"] += memory.driver  # shown together: both are overhead
    return [f"{values[name] / GIB_BYTES:.1f}" for name in columns]


def _time_columns(found: Answer) -> list[str]:
    """Return the parts that take time in at least one of the layouts."""
    predictions = [*found.layouts, *([found.stated] if found.stated else [])]
    names = [
        name
        for name in _TIME
        if any(getattr(prediction.time, name) > 5e-4 for prediction in predictions)
    ]
    return [*names, "hidden"]


def _time_row(prediction: Prediction, columns: list[str]) -> list[str]:
    values = {name: float(getattr(prediction.time, name)) for name in columns if name != "hidden"}
    values["hidden"] = sum(getattr(prediction.time, name) for name in _HIDDEN)
    return [f"{values[name]:.3g}" if values[name] >= 5e-4 else "-" for name in columns]


def _show_rejections(console: Console, found: Answer) -> None:
    console.print("\nrejected", style="bold")
    for rejection in found.rejections:
        console.print(f"- {rejection.name}: {rejection.reason}", highlight=False)
        if rejection.changed is not None:
            changed = rejection.changed
            size = format_bytes(changed.memory.total)
            speed = format_count(changed.tokens_per_second)
            console.print(
                f"    fits with {rejection.change}: {size}, {speed} tokens/s", highlight=False
            )
        elif rejection.needed_bytes is not None:
            console.print(
                "    does not fit with any recompute, micro-batch size, zero_stage or offload",
                highlight=False,
            )


def _show_growth(console: Console, found: Answer) -> None:
    from shardwright.planner.scaling import flattens_at

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
    for point in found.points:
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
    console.print(table)
    limit = flattens_at(list(found.points))
    if limit is not None:
        console.print(
            f"scaling is poor beyond {limit:,} GPUs: "
            "more yield less than half of the ideal speedup",
            highlight=False,
        )
