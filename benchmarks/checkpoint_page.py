"""Page of the checkpoint benchmark: tables of saves, loads and reshardings."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from shardwright.units import format_bytes

PLAIN = ("plain", "plain, past the cache")
"""Shares refer to the faster of these."""
STEP_SECONDS = 0.25
"""Seconds of matrix products that represent a step's forward and backward pass."""
FOLDER = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
NOTES = FOLDER / "checkpoints.notes.md"

Times = dict[str, float]
"""Seconds: `total`, and `stall` if the caller may continue before the end."""


def render_rows(
    measured: dict[str, list[Times]], size_bytes: int, plain_write: float, *, saves: bool
) -> list[str]:
    """Render a table with a row per contender, relative to the plain write."""
    lines = [
        "| | MiB/s, median (range) | share of the faster plain write | seconds |"
        + (" training waits |" if saves else ""),
        "| --- | ---: | ---: | ---: |" + (" ---: |" if saves else ""),
    ]
    for name, rounds in measured.items():
        totals = sorted(times["total"] for times in rounds)
        middle = statistics.median(totals)
        low, speed, high = (
            size_bytes / 2**20 / seconds for seconds in (totals[-1], middle, totals[0])
        )
        line = f"| {name} | {speed:.0f} ({low:.0f} to {high:.0f}) | "
        line += f"{plain_write / middle:.0%} | {middle:.3f} |"
        if saves:
            stall = statistics.median(times.get("stall", times["total"]) for times in rounds)
            share = statistics.median(
                times.get("stall", times["total"]) / times["total"] for times in rounds
            )
            line += f" {stall:.3f} s, {share:.1%} |"
        lines.append(line)
    return lines


def render_resharding(resharding: dict[str, dict[str, list[Times]]], size_bytes: int) -> list[str]:
    """Render a row per size and a column per number of ranks."""
    lines = [
        "| size | sharded by | " + " | ".join(f"{n} ranks" for n in resharding) + " |",
        "| ---: | --- |" + " ---: |" * len(resharding),
    ]
    for key in next(iter(resharding.values())):
        share, sharded_by = key.split("/")
        seconds = [
            statistics.median(times["total"] for times in rounds[key])
            for rounds in resharding.values()
        ]
        lines.append(
            f"| {format_bytes(size_bytes // int(share))} | {sharded_by} | "
            + " | ".join(f"{s:.3f}" for s in seconds)
            + " |"
        )
    return lines


def render_page(result: dict[str, Any]) -> str:
    """Render the page with the notes of `checkpoints.notes.md`."""
    conditions = result["conditions"]
    size = result["size_bytes"]
    before, after = result["load_average"]
    plain_write = min(
        statistics.median(times["total"] for times in result["saves"][name]) for name in PLAIN
    )
    slowed = statistics.median(times["slowed"] for times in result["saves"]["ours during a step"])
    return "\n".join(
        [
            "# Checkpoints: speed",
            "",
            f"Made by `python -m benchmarks.checkpoint --publish`, {conditions['date']}, "
            f"commit {conditions['commit']}.",
            f"{format_bytes(size)} of float32 in tensors of 4 MiB, sharded by rows over "
            f"{result['ranks']} ranks of one thread each;",
            f"{result['rounds']} rounds after a first one that does not count, contenders in turn.",
            f"{conditions['processor']}, {conditions['cores']} cores; "
            f"load average {before} before, {after} after.",
            "",
            "## Saving",
            "",
            "`plain` writes the same bytes with fsync, through the page cache; `plain, past the",
            "cache` writes past it; `hashed` is `plain` with a SHA-256 on a second thread,",
            "as in our saves.",
            "`ours in the background` is a save where the update follows at once and waits for the",
            "whole copy. In `ours during a step`, the update follows after",
            f"{STEP_SECONDS} s of matrix products, as it does after gradients. The products ran",
            f"{slowed:.0%} slower, because copying, hashing and writing use the same cores here.",
            "",
            *render_rows(result["saves"], size, plain_write, saves=True),
            "",
            "## Loading",
            "",
            "From the page cache. Ours hashes every byte before parsing; the others check nothing.",
            "",
            *render_rows(result["loads"], size, plain_write, saves=False),
            "",
            "## Opening the checkpoint of two ranks, sharded by rows, on other numbers of ranks",
            "",
            "Median seconds; every byte is hashed. One rank opens unsharded tensors.",
            "",
            *render_resharding(result["resharding"], size),
            "",
            *((NOTES.read_text(encoding="utf-8").rstrip(), "") if NOTES.exists() else ()),
        ]
    )
