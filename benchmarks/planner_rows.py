"""Published rows and their predictions: errors, selection of the rows of a fit, and tables."""

from __future__ import annotations

import hashlib
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shardwright.planner.published.measurements import (
    PublishedRun,
    extract_configuration,
    read_published_run,
    read_rows,
)
from shardwright.planner.published.predictions import compute_reported_memory_bytes, predict_run
from shardwright.planner.rates.calibration import EfficiencyTable
from shardwright.units import GIB_BYTES

SOURCES_WITH_KNOWN_FAILURES = ("aleph-layouts", "litgpt", "bloom-prequel")
"""Sources whose failures are known to be out of memory, so that `fits` can be checked."""


@dataclass(frozen=True)
class Row:
    """A published run with its measurements; `ran` is False if it did not fit."""

    case: PublishedRun
    tokens_per_second: float | None
    memory_gib: float | None
    ran: bool

    @property
    def order(self) -> bytes:
        """Hash of the id: an order that is the same on every machine and independent of the row's
        values.
        """
        return hashlib.sha256(self.case.id.encode()).digest()

    @property
    def is_judged(self) -> bool:
        """True if the reason why the row did or did not run is known."""
        return self.case.source in SOURCES_WITH_KNOWN_FAILURES


@dataclass(frozen=True)
class Errors:
    """Errors of one row.

    `time`: measured / predicted throughput - 1, the error of the step time. `memory`: predicted /
    measured - 1. `right`: `fits` is correct. `over`: distance of the predicted memory from the
    capacity, as a share of it, if `fits` is wrong; else 0.
    """

    time: float | None
    memory: float | None
    right: bool | None
    over: float = 0.0


def parse_number(text: str | None) -> float | None:
    return float(text) if text not in (None, "", "nan") else None


def load_rows(folder: Path) -> list[Row]:
    """Load all rows of both tables. Failures with an unknown cause (nanotron's) say nothing about
    memory and are left out.
    """
    rows = []
    for raw in read_rows(folder / "measurements.csv"):
        speed = parse_number(raw["tokens_per_sec_per_gpu"]) or parse_number(
            raw["derived_tokens_per_sec_per_gpu"]
        )
        rows.append(
            Row(
                read_published_run(raw["id"], extract_configuration(raw)),
                speed,
                parse_number(raw["peak_memory_gib_per_gpu"]),
                True,
            )
        )
    for raw in read_rows(folder / "failures.csv"):
        if raw["source_group"] != "nanotron-ultrascale":
            rows.append(
                Row(read_published_run(raw["id"], extract_configuration(raw)), None, None, False)
            )
    return [row for row in rows if row.tokens_per_second or row.memory_gib or row.is_judged]


def compute_errors(row: Row, efficiencies: EfficiencyTable) -> Errors:
    """Compute one row's errors with these efficiencies."""
    prediction = predict_run(row.case, efficiencies)
    predicted_gib = (
        compute_reported_memory_bytes(row.case, prediction, efficiencies) / GIB_BYTES
        if row.memory_gib
        else 0.0
    )
    right = prediction.fits == row.ran if row.is_judged else None
    return Errors(
        time=row.tokens_per_second / prediction.tokens_per_second_per_gpu - 1
        if row.tokens_per_second
        else None,
        memory=predicted_gib / row.memory_gib - 1 if row.memory_gib else None,
        right=right,
        over=abs(prediction.memory.total / prediction.memory_capacity_bytes - 1)
        if right is False
        else 0.0,
    )


def select_at_most(rows: Iterable[Row], max_rows: int) -> list[Row]:
    """Select the first `max_rows` rows of each source, by a hash of the id."""
    selected: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.order):
        selected[row.case.source].append(row)
    return [row for found in selected.values() for row in found[:max_rows]]


def split_into_halves(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """Split into every second row of each source, by a hash of the id, and the others."""
    halves: tuple[list[Row], list[Row]] = ([], [])
    places: dict[str, int] = defaultdict(int)
    for row in sorted(rows, key=lambda row: row.order):
        halves[places[row.case.source] % 2].append(row)
        places[row.case.source] += 1
    return halves


def show(title: str, rows: Iterable[Row], efficiencies: EfficiencyTable) -> None:
    """Print a table in Markdown: per source, the errors of step time and memory."""
    by_source: dict[str, list[Errors]] = defaultdict(list)
    for row in rows:
        by_source[row.case.source].append(compute_errors(row, efficiencies))
    show_errors(title, by_source)


def show_errors(title: str, by_source: dict[str, list[Errors]]) -> None:
    """Print the table of errors by source."""
    print(f"\n{title}\n", flush=True)
    print(
        "| source | rows | step time | bias | within 20% | memory rows | memory | bias "
        "| over 5% under | fits right |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for source, found in sorted(by_source.items()):
        time = [error.time for error in found if error.time is not None]
        memory = [error.memory for error in found if error.memory is not None]
        right = [error.right for error in found if error.right is not None]
        cells = [
            source,
            str(len(time)),
            format_mean(time),
            format_bias(time),
            format_share(abs(x) <= 0.2 for x in time),
            str(len(memory)),
        ]
        cells += [
            format_mean(memory),
            format_bias(memory),
            format_share(x < -0.05 for x in memory),
            format_share(right),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def format_mean(values: list[float]) -> str:
    return f"{100 * statistics.mean(map(abs, values)):.1f}%" if values else ""


def format_bias(values: list[float]) -> str:
    return f"{100 * statistics.median(values):+.1f}%" if values else ""


def format_share(hits: Iterable[bool]) -> str:
    found = list(hits)
    return f"{100 * sum(found) / len(found):.0f}%" if found else ""
