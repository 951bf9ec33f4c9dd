"""Figures of the CPU benchmark: from the replies of the ranks to a row, and to the terminal."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.predicted import describe_prediction


def average_over_ranks(replies: list[dict[str, Any]]) -> list[float]:
    """Return the loss of each step of a block; every rank has the same number of tokens."""
    return [
        sum(losses) / len(losses)
        for losses in zip(*(reply["losses"] for reply in replies), strict=True)
    ]


def summarise(row: dict[str, Any], tokens_per_step: int, steps: int) -> None:
    """Replace a row's raw replies by its figures.

    `peak_memory_bytes` is the largest resident high-water mark of a rank during timed blocks,
    `start_up_memory_bytes` that of everything before (imports, loading, sharding, warm-up);
    `processor_seconds_per_step` is summed over ranks and threads.
    """
    blocks = row.pop("blocks")
    warmup = row.pop("warmup")
    start_up = row.pop("start_up")
    rates = [tokens_per_step * steps / max(reply["seconds"] for reply in block) for block in blocks]
    losses = average_over_ranks(warmup) + [
        loss for block in blocks for loss in average_over_ranks(block)
    ]
    row |= {
        "tokens_per_second": median(rates),
        "tokens_per_second_lowest": min(rates),
        "tokens_per_second_highest": max(rates),
        "peak_memory_bytes": max(reply["peak_rss_bytes"] for block in blocks for reply in block),
        "start_up_memory_bytes": max(
            [reply["peak_rss_bytes"] for reply in warmup]
            + [reply["start_up"]["peak_rss_bytes"] for reply in start_up]
        ),
        "processor_seconds_per_step": sum(
            reply["cpu_seconds"] for block in blocks for reply in block
        )
        / len(blocks)
        / steps,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "tokens_per_second_by_round": rates,
    }


def print_comparison(measured: dict[str, Any]) -> None:
    """Print a few lines for the terminal."""
    ours = measured["contenders"].get("shardwright")
    print(f"{measured['name']}:", flush=True)
    for name, row in measured["contenders"].items():
        ratio = (
            f"  shardwright is {ours['tokens_per_second'] / row['tokens_per_second']:.2f}x"
            if ours and row is not ours
            else ""
        )
        lowest = row["tokens_per_second_lowest"]
        highest = row["tokens_per_second_highest"]
        rate = f"{row['tokens_per_second']:8.0f} tok/s ({lowest:.0f} to {highest:.0f})"
        cost = f"{row['processor_seconds_per_step']:6.2f} processor s/step "
        cost += f"{row['peak_memory_bytes'] / 2**20:6.0f} MiB"
        print(
            f"  {name:24}{rate} {cost}  "
            f"loss {row['first_loss']:.4f} -> {row['last_loss']:.4f}{ratio}",
            flush=True,
        )
        if "predicted" in row:
            print(describe_prediction(row), flush=True)
