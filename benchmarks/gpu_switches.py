"""Table of what each switch gives, from the steps of `make gpu` that measure it on and off.

It imports the standard library only.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks.gpu_figures import format_gib
from benchmarks.table import escape_cell, render_text_table

SWITCHES = """\
Every pair of runs that differ in one switch. Speed: seconds off over seconds on, so that 1.10 is
10% faster. Memory: the peak of allocated bytes; of single functions, what a call needs beyond its
operands. The sections below have the rest of each run, and what the cases are."""
_HEADER = ("switch on", "case", "ms on", "ms off", "speed", "GiB on", "GiB off")
FUNCTION_SWITCHES = {
    "AdamW, clipping and casts": "model.compile_functions: true",
    "8-bit AdamW": "model.compile_functions: true",
    "Adafactor": "model.compile_functions: true",
    "NF4 to bf16": "model.compile_functions: true",
    "loss of the head, bf16": "model.loss_chunk_tokens: auto",
    "loss of the head, one pass, bf16": "losses and their gradient in one function",
    "loss of the head by Liger's kernel, bf16": "model.loss_kernel: liger",
    "norms, gate, rotation and residual sum of a layer, bf16": "model.fused_pointwise: compiled",
    "tile of a shared row": "attention kernel of plain rows in a ring",
    "weights cast once per step": "precision.working_weights: true",
    "weights cast once per step, recomputed": "precision.working_weights: true",
}
"""Case of `benchmarks.gpu_functions` -> its switch."""
_OURS = "shardwright"


class SwitchRow(NamedTuple):
    """Seconds and peak bytes with a switch on and off; None where they are not known."""

    switch: str
    case: str
    on_seconds: float
    off_seconds: float
    on_bytes: float | None = None
    off_bytes: float | None = None


def render_switches(steps: Iterable[Mapping[str, Any]]) -> str | None:
    """Render the table; None if no step has both sides of a switch."""
    rows = [
        (
            escape_cell(row.switch),
            escape_cell(row.case),
            f"{row.on_seconds * 1e3:,.2f}",
            f"{row.off_seconds * 1e3:,.2f}",
            f"{row.off_seconds / row.on_seconds:.2f}",
            _format_memory(row.on_bytes),
            _format_memory(row.off_bytes),
        )
        for row in list_switches(steps)
    ]
    if not rows:
        return None
    table = render_text_table(_HEADER, rows)
    return f"## Which switch gives what\n\n{SWITCHES}\n\n{table}"


def _format_memory(num_bytes: float | None) -> str:
    is_small = num_bytes is not None and num_bytes < 2**30
    return f"{num_bytes / 2**30:.3f}" if num_bytes and is_small else format_gib(num_bytes)


def list_switches(steps: Iterable[Mapping[str, Any]]) -> list[SwitchRow]:
    """List the pairs of all steps. A result of another form has none; its own section says so."""
    rows: list[SwitchRow] = []
    speeds: dict[tuple[str, int], dict[tuple[str, ...], SwitchRow]] = {}
    for step in steps:
        result = step.get("result")
        if result is None:
            continue
        try:
            rows += _list_own(step["name"], result)
            _collect_speeds(result, speeds)
        except (AttributeError, KeyError, TypeError, ElementTree.ParseError):
            continue
    for (shape, length), runs in speeds.items():
        rows += _compare_speeds(f"{shape}, {length:,} tokens", runs)
    # A later step replaces an earlier one with the same case, as in the section of the case.
    return list({(row.switch, row.case): row for row in rows}.values())


def _list_own(step_name: str, result: Mapping[str, Any]) -> Iterator[SwitchRow]:
    """List the pairs within the result of one step."""
    for name, row in result.get("functions", {}).items():
        peaks = row["temporary_bytes"]
        seconds = (row["on_seconds"], row["off_seconds"])
        switch = FUNCTION_SWITCHES.get(name, name)
        yield SwitchRow(switch, name, *seconds, peaks.get("on"), peaks.get("off"))
    attention = result.get("attention", {})
    for name, row in attention.items():
        on = row["on"]
        off = row["off"]
        if "seconds" in on and "seconds" in off:
            peaks = (on["peak_bytes"], off["peak_bytes"])
            seconds = (on["seconds"], off["seconds"])
            yield SwitchRow("model.attention: auto", name, *seconds, *peaks)
    if "variants" in result:
        yield from _compare_variants(step_name, result["variants"])
    if "offload" in result:
        yield from _compare_offload(step_name, result["offload"])
    if "low_precision" in result:
        yield from _compare_recipes(result)
    if "junit" in result:
        yield from _compare_options(result["junit"])


def _compare_variants(step_name: str, variants: list[dict[str, Any]]) -> Iterator[SwitchRow]:
    """Compare each variant of the training loop with the one that it changes."""
    measured = {row["name"]: row for row in variants if "step_seconds" in row}
    for name, row in measured.items():
        other = measured.get(row.get("compared_with") or "")
        if other is None:
            continue
        on = other if row["is_off"] else row
        off = row if row["is_off"] else other
        yield SwitchRow(
            row["switch"],
            f"{step_name}: {name}",
            *(on["step_seconds"], off["step_seconds"]),
            *(on["peak_allocated_bytes"], off["peak_allocated_bytes"]),
        )


def _compare_offload(step_name: str, rows: list[dict[str, Any]]) -> Iterator[SwitchRow]:
    measured = {row["name"]: row for row in rows if "step_seconds" in row}
    for name, row in measured.items():
        off = measured.get(row.get("compared_with", "resident"))
        if off is not None and row is not off and name != "resident, again":
            seconds = (row["step_seconds"], off["step_seconds"])
            peaks = (row["peak_bytes"], off["peak_bytes"])
            yield SwitchRow(f"offload: {name}", step_name, *seconds, *peaks)


def _compare_recipes(result: Mapping[str, Any]) -> Iterator[SwitchRow]:
    """Compare the steps of each recipe with bf16's of the same kind."""
    steps = result["steps"]
    for name, row in steps.items():
        recipe, separator, kind = name.partition(", ")
        off = steps.get(f"bf16{separator}{kind}")
        if recipe == "bf16" or off is None or "seconds" not in row or "seconds" not in off:
            continue
        layers = "" if "all layers" in kind else f"{result['low_precision']['num_layers']} layer(s)"
        case = ", ".join(filter(None, ["Llama 3 8B", layers, kind]))
        peaks = (row["peak_bytes"], off["peak_bytes"])
        switch = f"precision: products of 8 or 4 bits, {recipe}"
        yield SwitchRow(switch, case, row["seconds"], off["seconds"], *peaks)


def _compare_options(junit: str) -> Iterator[SwitchRow]:
    """Compare the values of an option that tests on several GPUs have timed with the first one."""
    first: dict[str, float] = {}
    for each in ElementTree.fromstring(junit).iter("property"):
        option, _, value = str(each.get("name")).rpartition(": ")
        number, _, unit = str(each.get("value")).partition(" ")
        if not option or unit != "ms":
            continue
        seconds = float(number) / 1e3
        if option in first:
            yield SwitchRow(f"{option}: {value}", "two GPUs", seconds, first[option])
        else:
            first[option] = seconds


def _collect_speeds(
    result: Mapping[str, Any], speeds: dict[tuple[str, int], dict[tuple[str, ...], SwitchRow]]
) -> None:
    """Add the runs of shardwright by shape and length, with their options as keys."""
    for case in result.get("cases", ()):
        row = case["contenders"].get(_OURS, {})
        if "tokens_per_second" not in row:
            continue
        tokens = case["micro_batch_size"] * case["sequence_length"]
        seconds = tokens / row["tokens_per_second"]
        peak = row["peak_allocated_bytes"]
        runs = speeds.setdefault((case["shape"], case["sequence_length"]), {})
        options = tuple(sorted(case["options"]))
        runs[options] = SwitchRow("", "", seconds, seconds, peak, peak)


def _compare_speeds(case: str, runs: Mapping[tuple[str, ...], SwitchRow]) -> Iterator[SwitchRow]:
    for options, on in runs.items():
        for option, switch in (
            ("compile", "model.compile: true"),
            ("recompute", "recompute: full"),
        ):
            others = tuple(each for each in options if each != option)
            if others == options or others not in runs:
                continue
            off = runs[others]
            kind = ", ".join(filter(None, [case, *others]))
            seconds = (on.on_seconds, off.off_seconds)
            yield SwitchRow(switch, kind, *seconds, on.on_bytes, off.off_bytes)
