"""Figures of steps on one GPU, the same for every kind of step, and those of a contender's visits.

It imports the standard library only.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from statistics import median
from typing import Any, TypedDict

FIRST_LOSS_TOLERANCE = 0.02
"""Relative tolerance. Each contender draws its own weights from the same distribution, so first
losses are close, not equal.
"""

STEP_HEADER = (
    *("tokens/s", "MFU", "allocated GiB", "reserved GiB", "predicted GiB", "predicted s"),
    *("attention", "graph breaks", "host waits"),
)
"""Columns of `format_step`."""


class StepFigures(TypedDict):
    """Figures that every kind of step has."""

    tokens_per_second: float
    mfu: float
    """Share of the rate of 16-bit (in fp32 runs, of 32-bit) products of the device."""
    model_flops_per_second: float
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    predicted: dict[str, Any] | None
    """As `predicted.predict_step` returns it; None where nothing is predicted."""
    attention_operators: list[str]
    attention_kernels: list[str]
    """Kernels of attention, by the operators that the profiler saw."""
    graph_breaks: int
    host_waits: float | None
    """Waits of the host per step; None where there is no CUDA device."""


def build_step_figures(
    *,
    tokens_per_second: float,
    flops_per_token: float,
    ceiling: float,
    measured: Mapping[str, Any],
    predicted: dict[str, Any] | None,
) -> StepFigures:
    """Build the figures of a step.

    Args:
        ceiling: FLOP/s of matrix products on the device.
        measured: peaks, attention, graph breaks and waits by the names of `StepFigures`.
    """
    return {
        "tokens_per_second": tokens_per_second,
        "mfu": tokens_per_second * flops_per_token / ceiling,
        "model_flops_per_second": tokens_per_second * flops_per_token,
        "peak_allocated_bytes": measured["peak_allocated_bytes"],
        "peak_reserved_bytes": measured["peak_reserved_bytes"],
        "predicted": predicted,
        "attention_operators": measured["attention_operators"],
        "attention_kernels": measured["attention_kernels"],
        "graph_breaks": measured["graph_breaks"],
        "host_waits": measured["host_waits"],
    }


def format_step(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Format the cells of `STEP_HEADER`.

    Of an earlier result, which lacks most figures, only the peak of allocated bytes.
    """
    if "mfu" not in row:
        return ("", "", format_gib(row.get("peak_bytes")), *("",) * (len(STEP_HEADER) - 3))
    predicted = row["predicted"] or {}
    gib = [
        format_gib(each)
        for each in (
            row["peak_allocated_bytes"],
            row["peak_reserved_bytes"],
            predicted.get("memory_bytes"),
        )
    ]
    seconds = predicted.get("step_seconds")
    return (
        f"{row['tokens_per_second']:,.0f}",
        f"{row['mfu']:.1%}",
        *gib,
        "" if seconds is None else f"{seconds:.4g}",
        name_attention_kernels(row),
        str(row["graph_breaks"]),
        describe_host_waits(row),
    )


def format_gib(num_bytes: float | None) -> str:
    """Format bytes in GiB; "" for None."""
    return "" if num_bytes is None else f"{num_bytes / 2**30:,.1f}"


def summarise(
    replies: list[dict[str, Any]], tokens: int, flops_per_token: float, ceiling: float
) -> dict[str, Any]:
    """Compute the figures of one contender over its visits."""
    rates = [tokens / reply["seconds"] for reply in replies]
    return {
        **build_step_figures(
            tokens_per_second=median(rates),
            flops_per_token=flops_per_token,
            ceiling=ceiling,
            measured=replies[-1]
            | {
                key: max((reply.get(key, 0) for reply in replies), default=0) or None
                for key in ("peak_allocated_bytes", "peak_reserved_bytes")
            }
            | {"graph_breaks": max(reply.get("graph_breaks", 0) for reply in replies)},
            predicted=None,
        ),
        "tokens_per_second_lowest": min(rates),
        "tokens_per_second_highest": max(rates),
        "peak_rss_bytes": max(reply["peak_rss_bytes"] for reply in replies),
        "attention": replies[-1]["attention"],
        "warmup_seconds": replies[0]["warmup_seconds"],
        "start_seconds": replies[0]["start_seconds"],
        "compiled_graphs": replies[0]["compiled_graphs"],
        "first_loss": replies[0]["losses"][0],
        "last_loss": replies[0]["losses"][-1],
    }


def check_first_losses(case_name: str, rows: dict[str, dict[str, Any]]) -> None:
    """Turn rows with a different first loss into failures: they do not do the same work."""
    first = {name: row["first_loss"] for name, row in rows.items() if "first_loss" in row}
    if not first:
        return
    middle = median(first.values())
    for name, loss in first.items():
        if not abs(loss - middle) <= FIRST_LOSS_TOLERANCE * middle:
            rows[name] = {
                "failed": f"failed: its first loss is {loss:.4f}, the others' {middle:.4f}"
            }
            print(f"{case_name}: {name} {rows[name]['failed']}", file=sys.stderr, flush=True)


def print_case(measured: dict[str, Any]) -> None:
    """Print a few lines for the terminal."""
    print(
        f"{measured['name']}  (ceiling {measured['matmul_flops_per_second'] / 1e12:.3g} TFLOP/s)",
        flush=True,
    )
    for name, row in measured["contenders"].items():
        if "failed" in row:
            print(f"  {name:15}{row['failed']}", flush=True)
            continue
        memory = (
            f"{row['peak_allocated_bytes'] / 2**30:7.1f} GiB" if row["peak_allocated_bytes"] else ""
        )
        waits = describe_host_waits(row)
        print(
            f"  {name:15}{row['tokens_per_second']:9.0f} tok/s  MFU {row['mfu']:6.1%} {memory}  "
            f"loss {row['first_loss']:.3f} -> {row['last_loss']:.3f}  "
            f"attention {name_attention_kernels(row)}  {waits and f'host waits {waits}'}",
            flush=True,
        )
        if row.get("predicted"):
            from benchmarks.predicted import describe_prediction

            print(describe_prediction(row), flush=True)


def name_attention_kernels(row: Mapping[str, Any]) -> str:
    """Name the kernels of attention that a row's step ran.

    Of an earlier result, in which they are not recorded, name what the log says, without reasons.
    """
    if "attention_kernels" in row:
        return ", ".join(row["attention_kernels"]) or "no attention operator"
    lines = [re.sub(r" \([^()]*\)", "", line) for line in row["attention"]]
    return ", ".join(dict.fromkeys(f"{each} (log)" for line in lines for each in line.split("; ")))


def describe_host_waits(row: Mapping[str, Any]) -> str:
    """Return the waits of the host per step; "" where there is no CUDA device to wait for."""
    return "" if row["host_waits"] is None else f"{row['host_waits']:g}"


def count_predicted_runs(results: Mapping[str, Any], measured: str) -> int:
    """Count the speed cases of a gpu.json whose run of shardwright has a prediction and the figure
    `measured`."""
    runs = (
        case["contenders"].get("shardwright", {})
        for step in results["steps"]
        if step["name"].startswith("speed ")
        for case in (step.get("result") or {}).get("cases", ())
    )
    return sum(bool(run.get("predicted") and run.get(measured)) for run in runs)
