"""The page of `benchmarks.cuts` out of its JSON: speeds, predictions beside measurements, pipelines
beside their schedules.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import Any

from benchmarks.cut_cases import GLOBAL_BATCH, MICRO_BATCHES, TOKENS


def page(result: dict[str, Any], notes: str = "") -> str:
    """All tables in Markdown, with what a program cannot know."""
    groups = result["groups"]
    conditions = next(iter(groups.values()))["conditions"]
    lines = [
        "# Every cut on two CPU ranks",
        "",
        f"{conditions['processor']}, {conditions['cores']} cores, torch {conditions['packages']['torch']}, one thread a rank. "
        f"Global batch {GLOBAL_BATCH} x {TOKENS} tokens in {MICRO_BATCHES} micro-batches. Every row of a model does the same work "
        "and begins at the same loss; medians over rounds in turn.",
        f"`python -m benchmarks.cuts --name {result['name']} --publish` makes this page.",
        "",
        "| model | measured | rounds | load average before, after |",
        "|---|---|---|---|",
    ]
    for name, group in groups.items():
        told = group["conditions"]
        before, after = told["load_average"]
        made = told["date"] + (f", commit {told['commit']}" if told["commit"] else "")
        lines.append(f"| {name} | {made} | {told['rounds']} | {before}, {after} |")
    lines += [
        "",
        "## Speed",
        "",
        *_speeds(groups),
        "",
        "Parts are seconds on rank 0.",
        "",
        "## Predicted and measured",
        "",
    ]
    lines += [
        *_predictions(groups),
        "",
        "## Pipelines beside their schedules",
        "",
        *_pipelines(groups),
    ]
    if notes:
        lines += ["", notes.rstrip()]
    return "\n".join(lines) + "\n"


def _rows(groups: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for group in groups.values():
        yield from group["rows"]


def _speeds(groups: dict[str, Any]) -> Iterator[str]:
    parts = list(next(_rows(groups))["parts"])
    yield (
        "| model | layout | seconds a step | speed-up over one process | over ZeRO-3 | "
        + " | ".join(parts)
        + " |"
    )
    yield "|---|---|---|---|---|" + "---|" * len(parts)
    plain = {
        (row["work"], row["layout"]): row["seconds"]
        for row in _rows(groups)
        if row["recompute"] == "none"
    }
    for row in _rows(groups):
        shares = " | ".join(f"{row['parts'].get(part, 0.0):.2f}" for part in parts)
        bases = (
            plain.get((row["work"], layout))
            for layout in ("one process", "dp_shard=2,zero_stage=3")
        )
        speed, over = ("" if base is None else f"{base / row['seconds']:.2f}" for base in bases)
        yield f"| {row['work']} | {_name(row)} | {row['seconds']:.2f} | {speed} | {over} | {shares} |"


def _name(row: dict[str, Any]) -> str:
    return row["layout"] + (", recompute full" if row["recompute"] == "full" else "")


def _predictions(groups: dict[str, Any]) -> Iterator[str]:
    """With the measured profile; beside it what the catalogue's CPU alone would give."""
    yield "| model | layout | seconds | predicted | error | from the catalogue alone | MiB of tensors | predicted | error |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    errors = []
    memory = []
    for row in _rows(groups):
        guess = row.get("predicted")
        if guess is None:
            continue
        errors.append(guess["step_seconds"] / row["seconds"] - 1)
        memory.append(guess["memory_bytes"] / row["memory_bytes"] - 1)
        bare = row["predicted_by_catalogue"]["step_seconds"]
        seconds = row["seconds"]
        yield (
            f"| {row['work']} | {_name(row)} | {seconds:.2f} | {guess['step_seconds']:.2f} | {errors[-1]:+.0%} | {bare:.3f} | "
            f"{row['memory_bytes'] / 2**20:,.0f} | {guess['memory_bytes'] / 2**20:,.0f} | {memory[-1]:+.1%} |"
        )
    if errors:
        within = mean(abs(error) <= 0.2 for error in errors)
        yield ""
        yield (
            f"{len(errors)} rows: step time {mean(map(abs, errors)):.1%} off on average ({mean(errors):+.1%} of it to one side), "
            f"{within:.0%} within 20%; memory {mean(map(abs, memory)):.1%} off, at worst {max(memory, key=abs):+.1%}."
        )


def _pipelines(groups: dict[str, Any]) -> Iterator[str]:
    yield "| model | schedule | measured utilisation | its schedule's with these times | share |"
    yield "|---|---|---|---|---|"
    for row in _rows(groups):
        if found := row.get("utilisation"):
            shares = f"{found['measured']:.1%} | {found['of_schedule']:.1%} | {found['share']:.1%}"
            yield f"| {row['work']} | {row['layout']} | {shares} |"
