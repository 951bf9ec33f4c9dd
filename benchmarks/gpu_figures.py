"""Figures of the benchmark on one GPU, computed from the visits of a contender and printed."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from statistics import median
from typing import Any

FIRST_LOSS_TOLERANCE = 0.02
"""Relative tolerance. Each contender draws its own weights from the same distribution, so first
losses are close, not equal.
"""


def summarise(
    replies: list[dict[str, Any]], tokens: int, flops_per_token: float, ceiling: float
) -> dict[str, Any]:
    """Compute the figures of one contender over its visits."""
    rates = [tokens / reply["seconds"] for reply in replies]
    return {
        "tokens_per_second": median(rates),
        "tokens_per_second_lowest": min(rates),
        "tokens_per_second_highest": max(rates),
        "mfu": median(rates) * flops_per_token / ceiling,
        "model_flops_per_second": median(rates) * flops_per_token,
        "peak_allocated_bytes": max(
            (reply.get("peak_allocated_bytes", 0) for reply in replies), default=0
        )
        or None,
        "peak_reserved_bytes": max(
            (reply.get("peak_reserved_bytes", 0) for reply in replies), default=0
        )
        or None,
        "peak_rss_bytes": max(reply["peak_rss_bytes"] for reply in replies),
        "graph_breaks": max(reply.get("graph_breaks", 0) for reply in replies),
        "attention": replies[-1]["attention"],
        "host_waits": replies[-1]["host_waits"],
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
        if "predicted" in row:
            from benchmarks.predicted import describe_prediction

            print(describe_prediction(row), flush=True)


def name_attention_kernels(row: dict[str, Any]) -> str:
    """Name the kernels of attention that a row's contender took, without the reasons."""
    lines = [re.sub(r" \([^()]*\)", "", line) for line in row["attention"]]
    return ", ".join(dict.fromkeys(kernel for line in lines for kernel in line.split("; ")))


def describe_host_waits(row: dict[str, Any]) -> str:
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
