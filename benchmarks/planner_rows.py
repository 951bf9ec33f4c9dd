"""Published rows beside what the planner says of them: errors, the rows that a fit looks at, and
tables of both.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shardwright.planner.calibration import EfficiencyTable
from shardwright.planner.published.measurements import (
    PublishedRun,
    extract_configuration,
    read_published_run,
    read_rows,
)
from shardwright.planner.published.predictions import compute_reported_memory_bytes, predict_run
from shardwright.units import GIB_BYTES

JUDGED = ("aleph-layouts", "litgpt", "bloom-prequel")
"""Sources whose failures are known to be out of memory, so that `fits` of their rows is right or
wrong.
"""


@dataclass(frozen=True)
class Row:
    """A case with what was measured; `ran` False is a run that did not fit."""

    case: PublishedRun
    tokens_per_second: float | None
    memory_gib: float | None
    ran: bool

    @property
    def order(self) -> bytes:
        """A hash of the id: an order that is the same on every machine and has nothing to do with
        the row.
        """
        return hashlib.sha256(self.case.id.encode()).digest()

    @property
    def judged(self) -> bool:
        """Whether it is known why the row did or did not run."""
        return self.case.source in JUDGED


@dataclass(frozen=True)
class Errors:
    """Of one row: measured over predicted throughput less one (the error of the step time),
    predicted over measured memory less one, and whether `fits` is right. `over` is by how much the
    device's memory is on the wrong side of what is needed, as a share of it; 0 where `fits` is
    right."""

    time: float | None
    memory: float | None
    right: bool | None
    over: float = 0.0


def number(text: str | None) -> float | None:
    return float(text) if text not in (None, "", "nan") else None


def load_rows(folder: Path) -> list[Row]:
    """All rows of both tables. Failures whose cause is unknown (nanotron's) teach nothing about
    memory and are left out.
    """
    rows = []
    for raw in read_rows(folder / "measurements.csv"):
        speed = number(raw["tokens_per_sec_per_gpu"]) or number(
            raw["derived_tokens_per_sec_per_gpu"]
        )
        rows.append(
            Row(
                read_published_run(raw["id"], extract_configuration(raw)),
                speed,
                number(raw["peak_memory_gib_per_gpu"]),
                True,
            )
        )
    for raw in read_rows(folder / "failures.csv"):
        if raw["source_group"] != "nanotron-ultrascale":
            rows.append(
                Row(read_published_run(raw["id"], extract_configuration(raw)), None, None, False)
            )
    return [row for row in rows if row.tokens_per_second or row.memory_gib or row.judged]


def errors_of(row: Row, efficiencies: EfficiencyTable) -> Errors:
    """One row's errors under some efficiencies."""
    prediction = predict_run(row.case, efficiencies)
    predicted_gib = (
        compute_reported_memory_bytes(row.case, prediction, efficiencies) / GIB_BYTES
        if row.memory_gib
        else 0.0
    )
    right = prediction.fits == row.ran if row.judged else None
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


def at_most(rows: Iterable[Row], most: int) -> list[Row]:
    """Of each source the first so many rows, by a hash of the id."""
    chosen: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.order):
        chosen[row.case.source].append(row)
    return [row for found in chosen.values() for row in found[:most]]


def halve(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """Every second row of each source, by a hash of the id, and the others."""
    halves: tuple[list[Row], list[Row]] = ([], [])
    places: dict[str, int] = defaultdict(int)
    for row in sorted(rows, key=lambda row: row.order):
        halves[places[row.case.source] % 2].append(row)
        places[row.case.source] += 1
    return halves


def show(title: str, rows: Iterable[Row], efficiencies: EfficiencyTable) -> None:
    """A table in Markdown: per source, error of the step time and of memory."""
    by_source: dict[str, list[Errors]] = defaultdict(list)
    for row in rows:
        by_source[row.case.source].append(errors_of(row, efficiencies))
    show_errors(title, by_source)


def show_errors(title: str, by_source: dict[str, list[Errors]]) -> None:
    """The same of errors that are known already."""
    print(f"\n{title}\n", flush=True)
    print(
        "| source | rows | step time | bias | within 20% | memory rows | memory | bias | over 5% under | fits right |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for source, found in sorted(by_source.items()):
        time = [error.time for error in found if error.time is not None]
        memory = [error.memory for error in found if error.memory is not None]
        right = [error.right for error in found if error.right is not None]
        cells = [
            source,
            str(len(time)),
            mean_of(time),
            bias_of(time),
            share_of(abs(x) <= 0.2 for x in time),
            str(len(memory)),
        ]
        cells += [
            mean_of(memory),
            bias_of(memory),
            share_of(x < -0.05 for x in memory),
            share_of(right),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def mean_of(values: list[float]) -> str:
    return f"{100 * statistics.mean(map(abs, values)):.1f}%" if values else ""


def bias_of(values: list[float]) -> str:
    return f"{100 * statistics.median(values):+.1f}%" if values else ""


def share_of(hits: Iterable[bool]) -> str:
    found = list(hits)
    return f"{100 * sum(found) / len(found):.0f}%" if found else ""
