"""Figures of the benchmark on one GPU, computed from the visits of a contender and printed."""

from __future__ import annotations

from statistics import median
from typing import Any


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
        "warmup_seconds": replies[0]["warmup_seconds"],
        "first_loss": replies[0]["losses"][0],
        "last_loss": replies[0]["losses"][-1],
    }


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
        print(
            f"  {name:15}{row['tokens_per_second']:9.0f} tok/s  MFU {row['mfu']:6.1%} {memory}  "
            f"loss {row['first_loss']:.3f} -> {row['last_loss']:.3f}",
            flush=True,
        )
        if "predicted" in row:
            from benchmarks.predicted import describe_prediction

            print(describe_prediction(row), flush=True)
