"""Render the page of `benchmarks.layouts` from its JSON: speeds, predictions and measurements,
pipelines and their schedules.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import Any

from benchmarks.layout_cases import GLOBAL_BATCH, MICRO_BATCHES, TOKENS


def render_page(result: dict[str, Any], notes: str = "") -> str:
    """Render all tables in Markdown, followed by the notes."""
    groups = result["groups"]
    conditions = next(iter(groups.values()))["conditions"]
    lines = [
        "# Every layout on two CPU ranks",
        "",
        f"{conditions['processor']}, {conditions['cores']} cores, "
        f"torch {conditions['packages']['torch']}, one thread per rank. "
        f"Global batch {GLOBAL_BATCH} x {TOKENS} tokens in {MICRO_BATCHES} micro-batches. "
        "Every row of a model does the same work and starts at the same loss; medians over rounds "
        "in turn.",
        f"`python -m benchmarks.layouts --name {result['name']} --publish` makes this page.",
        "",
        "| model | measured | rounds | load average before, after |",
        "|---|---|---|---|",
    ]
    for name, group in groups.items():
        group_conditions = group["conditions"]
        before, after = group_conditions["load_average"]
        made = group_conditions["date"] + (
            f", commit {group_conditions['commit']}" if group_conditions["commit"] else ""
        )
        lines.append(f"| {name} | {made} | {group_conditions['rounds']} | {before}, {after} |")
    lines += [
        "",
        "## Speed",
        "",
        *_render_speeds(groups),
        "",
        "Parts are seconds on rank 0.",
        "",
        "## Predicted and measured",
        "",
    ]
    lines += [
        *_render_predictions(groups),
        "",
        "## Pipelines and their schedules",
        "",
        *_render_pipelines(groups),
    ]
    if notes:
        lines += ["", notes.rstrip()]
    return "\n".join(lines) + "\n"


def _iterate_rows(groups: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for group in groups.values():
        yield from group["rows"]


def _render_speeds(groups: dict[str, Any]) -> Iterator[str]:
    parts = list(next(_iterate_rows(groups))["parts"])
    yield (
        "| model | layout | seconds a step | speed-up over one process | over ZeRO-3 | "
        + " | ".join(parts)
        + " |"
    )
    yield "|---|---|---|---|---|" + "---|" * len(parts)
    plain = {
        (row["work"], row["layout"]): row["seconds"]
        for row in _iterate_rows(groups)
        if row["recompute"] == "none"
    }
    for row in _iterate_rows(groups):
        shares = " | ".join(f"{row['parts'].get(part, 0.0):.2f}" for part in parts)
        bases = (
            plain.get((row["work"], layout))
            for layout in ("one process", "dp_shard=2,zero_stage=3")
        )
        speed, over = ("" if base is None else f"{base / row['seconds']:.2f}" for base in bases)
        yield (
            f"| {row['work']} | {_name_layout(row)} | {row['seconds']:.2f} | {speed} | {over} | "
            f"{shares} |"
        )


def _name_layout(row: dict[str, Any]) -> str:
    return row["layout"] + (", recompute full" if row["recompute"] == "full" else "")


def _render_predictions(groups: dict[str, Any]) -> Iterator[str]:
    """Render predictions with the measured profile, and with the catalogue's CPU alone."""
    yield (
        "| model | layout | seconds | predicted | error | from the catalogue alone "
        "| MiB of tensors | predicted | error |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    errors = []
    memory = []
    for row in _iterate_rows(groups):
        predicted = row.get("predicted")
        if predicted is None:
            continue
        errors.append(predicted["step_seconds"] / row["seconds"] - 1)
        memory.append(predicted["memory_bytes"] / row["memory_bytes"] - 1)
        catalogue_seconds = row["predicted_by_catalogue"]["step_seconds"]
        seconds = row["seconds"]
        yield (
            f"| {row['work']} | {_name_layout(row)} | {seconds:.2f} | "
            f"{predicted['step_seconds']:.2f} | {errors[-1]:+.0%} | {catalogue_seconds:.3f} | "
            f"{row['memory_bytes'] / 2**20:,.0f} | {predicted['memory_bytes'] / 2**20:,.0f} | "
            f"{memory[-1]:+.1%} |"
        )
    if errors:
        within = mean(abs(error) <= 0.2 for error in errors)
        yield ""
        yield (
            f"{len(errors)} rows: step time {mean(map(abs, errors)):.1%} off on average "
            f"(bias {mean(errors):+.1%}), {within:.0%} within 20%; memory "
            f"{mean(map(abs, memory)):.1%} off, at worst {max(memory, key=abs):+.1%}."
        )


def _render_pipelines(groups: dict[str, Any]) -> Iterator[str]:
    yield "| model | schedule | measured utilisation | simulated with these times | share |"
    yield "|---|---|---|---|---|"
    for row in _iterate_rows(groups):
        if utilisation := row.get("utilisation"):
            keys = ("measured", "of_schedule", "share")
            shares = " | ".join(f"{utilisation[key]:.1%}" for key in keys)
            yield f"| {row['work']} | {row['layout']} | {shares} |"
