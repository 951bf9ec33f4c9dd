"""A plan as tables for people: layouts, where their memory and time go, what was rejected, how it grows."""

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

_MEMORY = ("weights", "gradients", "optimizer", "activations", "logits", "gathered", "workspaces", "reserve")
_SHORT = {"gradients": "grads", "optimizer": "optim", "activations": "activ", "workspaces": "work", "tensor": "tp", "context": "cp"}
_SHORT |= {"expert": "ep", "pipeline": "pp", "overhead": "other"}
_TIME = ("compute", "tensor", "context", "expert", "pipeline", "data", "bubble", "optimizer", "reference", "overhead")
_HIDDEN = ("hidden_tensor", "hidden_context", "hidden_expert", "hidden_pipeline", "hidden_data")


def show(found: Answer, recipe: Recipe, cluster: Cluster, *, top: int, seconds: float, console: Console | None = None) -> None:
    """Print everything that was found."""
    console = console or open_console()
    shown = found.layouts or ((found.stated,) if found.stated else ())
    template = shown[0].candidate if shown else None
    batch = recipe.training.global_batch_size
    told = f"{recipe.name} on {cluster.name}: {recipe.training.sequence_length:,} tokens a sequence"
    told += f", {batch:,} sequences a step" if batch else ""
    told += f", {template.precision}" if template is not None else ""
    told += f" (precision auto: {found.precision_reason})" if found.precision_reason is not None else ""
    if template is not None and template.adapter is not None:
        told += f", LoRA of rank {template.adapter.rank}" + (" over NF4" if template.adapter.quantised else "")
    console.print(told, highlight=False)
    if cluster.profile is not None:
        console.print(f"rates {cluster.rates}; what is not among them is the data sheet's", highlight=False)
    if found.layouts:
        _show_layouts(console, found, recipe)
        _show_parts(console, found, "memory per GPU, GiB", _memory_columns(found), _memory_row)
        _show_parts(console, found, "seconds of a step", _time_columns(found), _time_row)
    if found.impossible is not None:
        console.print(f"\nnot as the recipe has it: {found.impossible}", highlight=False)
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
    proven = f"the first {first} of the table are proven best; " if first > 1 else "the first is proven best; " if first else ""
    console.print(
        f"\n{effort.num_predicted:,} layouts predicted in full, {effort.num_too_large:,} left out for memory by their bounds; "
        f"{proven}{format_seconds(seconds)}",
        style="dim",
        highlight=False,
    )


def _show_layouts(console: Console, found: Answer, recipe: Recipe) -> None:
    steps = recipe.training.max_steps
    table = Table(box=None, pad_edge=False, title="layouts that fit, fastest first", title_justify="left", title_style="bold")
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
        where = "" if chosen is found.layouts[0] else ": of those within 3% of the fastest the one that is cut least"
        if found.is_chosen_for_room:
            where = f": the best with room for {MEMORY_ERROR_SHARE:.0%} more memory than predicted"
        console.print(f"chosen: {chosen.candidate.describe()}{where}", style="green", highlight=False)
        if chosen.warning is not None:
            console.print(f"warning: the chosen layout {chosen.warning}", style="yellow", highlight=False)
    if found.stated is not None:
        told = "as the recipe has it" + ("" if found.stated.fits else ", which does not fit")
        console.print(f"=: {told}", highlight=False)
    if any(prediction.is_tight for _, prediction in _numbered(found)):
        told = f"tight: fits, but not with {MEMORY_ERROR_SHARE:.0%} more memory than predicted"
        console.print(told, highlight=False)
    if any(not prediction.candidate.runnable for prediction in found.layouts):
        console.print("*: predicted only; `train` cannot run it", highlight=False)


def _numbered(found: Answer) -> list[tuple[str, Prediction]]:
    """The layouts by number; `+` is the chosen one where it is not among them, `=` what the recipe says."""
    rows = [(str(number), prediction) for number, prediction in enumerate(found.layouts, 1)]
    if found.chosen is not None and not any(prediction is found.chosen for prediction in found.layouts):
        rows.append(("+", found.chosen))
    return rows + ([("=", found.stated)] if found.stated is not None else [])


def _layout_row(number: str, prediction: Prediction, steps: int | None) -> list[str]:
    candidate = prediction.candidate
    batch = f"{candidate.micro_batch_size} x {candidate.gradient_accumulation_steps}"
    cells = [number, candidate.describe() + _mark(prediction), batch, candidate.recompute]
    cells += [format_count(prediction.tokens_per_second), f"{prediction.model_flops_utilisation:.1%}"]
    cells += [format_seconds(prediction.time.step), f"{prediction.memory.total / GIB_BYTES:.1f}"]
    if steps is not None:
        cells += [f"{prediction.days(steps):.3g}", format_count(prediction.gpu_hours(steps))]
    return cells


def _mark(prediction: Prediction) -> str:
    return ("" if prediction.candidate.runnable else " *") + (" (tight)" if prediction.is_tight else "")


def _show_parts(console: Console, found: Answer, title: str, columns: list[str], row: object) -> None:
    assert callable(row)
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    table.add_column("", justify="right")
    for column in columns:
        table.add_column(_SHORT.get(column, column), justify="right", no_wrap=True)
    for number, prediction in _numbered(found):
        table.add_row(number, *row(prediction, columns), style="bold green" if prediction is found.chosen else None)
    console.print()
    console.print(table)


def _memory_columns(found: Answer) -> list[str]:
    return [*_MEMORY, "total"]


def _memory_row(prediction: Prediction, columns: list[str]) -> list[str]:
    memory = prediction.memory
    values = {name: float(getattr(memory, name)) for name in columns}
    values["workspaces"] += memory.driver  # the driver's share is a workspace to the reader
    return [f"{values[name] / GIB_BYTES:.1f}" for name in columns]


def _time_columns(found: Answer) -> list[str]:
    """Parts that any layout shown has."""
    everything = [*found.layouts, *([found.stated] if found.stated else [])]
    used = [name for name in _TIME if any(getattr(prediction.time, name) > 5e-4 for prediction in everything)]
    return [*used, "hidden"]


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
            size, speed = format_bytes(changed.memory.total), format_count(changed.tokens_per_second)
            console.print(f"    fits with {rejection.change}: {size}, {speed} tokens/s", highlight=False)
        elif rejection.needed_bytes is not None:
            console.print("    no change of recompute, micro batch, zero stage or offload makes it fit", highlight=False)


def _show_growth(console: Console, found: Answer) -> None:
    from shardwright.planner.scaling import flattens_at

    table = Table(box=None, pad_edge=False, title="growth at the same global batch", title_justify="left", title_style="bold")
    table.add_column("GPUs", justify="right")
    table.add_column("layout", overflow="fold", ratio=1)
    for name in ("tok/s", "per GPU", "efficiency", "MFU"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in found.points:
        prediction = point.prediction
        if prediction is None or point.efficiency is None:
            table.add_row(str(point.num_gpus), "nothing fits", "", "", "", "")
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
    flat = flattens_at(list(found.points))
    if flat is not None:
        console.print(f"flat beyond {flat:,} GPUs: more bring less than half of what they should", highlight=False)
