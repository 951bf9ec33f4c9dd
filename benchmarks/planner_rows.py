"""Published rows and their predictions: errors, selection of the rows of a fit, and tables."""

from __future__ import annotations

import hashlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from shardwright.planner.published.measurements import (
    PublishedRun,
    extract_configuration,
    read_published_run,
    read_rows,
)
from shardwright.planner.published.predictions import (
    compute_reported_memory_bytes,
    predict_published_run,
)
from shardwright.planner.rates.calibration import EfficiencyTable
from shardwright.units import GIB_BYTES

SOURCES_WITH_KNOWN_FAILURES = ("aleph-layouts", "litgpt", "bloom-prequel")
"""Sources whose failures are known to be out of memory, so that `fits` can be checked."""
JOB_COLUMNS = ("source_group", "model_name", "gpu", "gpus", "seq_len", "global_batch")
MAX_ROWS_PER_SOURCE = 300
"""Largest number of rows per source in a fit: more of nanotron's 948 add no information."""
NOISY_SOURCE = "nanotron-ultrascale"
"""Source whose repeated runs differ by a factor of up to five."""


@dataclass(frozen=True)
class Row:
    """A published run with its measurements; `ran` is False if it did not fit.

    `job`: columns that rows of one job have in common, as in the folder's score.py.
    """

    case: PublishedRun
    tokens_per_second: float | None
    memory_gib: float | None
    ran: bool
    job: tuple[str, ...] = ()

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
                tuple(raw[column] for column in JOB_COLUMNS),
            )
        )
    for raw in read_rows(folder / "failures.csv"):
        if raw["source_group"] != "nanotron-ultrascale":
            rows.append(
                Row(
                    read_published_run(raw["id"], extract_configuration(raw)),
                    None,
                    None,
                    False,
                    tuple(raw[column] for column in JOB_COLUMNS),
                )
            )
    return [row for row in rows if row.tokens_per_second or row.memory_gib or row.is_judged]


def compute_errors(row: Row, efficiencies: EfficiencyTable) -> Errors:
    """Compute one row's errors with these efficiencies."""
    prediction = predict_published_run(row.case, efficiencies)
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


def list_sources_with_shared_trainer(rows: Iterable[Row]) -> list[str]:
    """List the sources of which most timed rows have a trainer that another source has too."""
    trainers: dict[str, set[str]] = defaultdict(set)
    timed = [row.case for row in rows if row.tokens_per_second]
    for case in timed:
        trainers[case.framework].add(case.source)
    shared: dict[str, list[bool]] = defaultdict(list)
    for case in timed:
        shared[case.source].append(len(trainers[case.framework]) > 1)
    return [source for source, found in sorted(shared.items()) if statistics.mean(found) > 0.5]


def show_goals(rows: Sequence[Row], errors: Mapping[str, Errors]) -> None:
    """Print the means that the goals for unseen rows are about."""
    by_source: dict[str, list[float]] = defaultdict(list)
    memory: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        error = errors[row.case.id]
        if error.time is not None:
            by_source[row.case.source].append(abs(error.time))
        if error.memory is not None:
            memory[row.case.source].append(abs(error.memory))
    means = {source: statistics.mean(found) for source, found in by_source.items()}
    shared = [means[source] for source in list_sources_with_shared_trainer(rows)]
    rest = [x for source, found in memory.items() if source != NOISY_SOURCE for x in found]
    print(
        f"\nstep time: {statistics.mean(shared):.1%} over {len(shared)} sources with a shared",
        end="",
    )
    print(f" trainer, {statistics.mean(means.values()):.1%} over all {len(means)}")
    print(
        f"memory: {statistics.mean([x for found in memory.values() for x in found]):.1%} of rows,",
        end="",
    )
    print(f" {statistics.mean(rest):.1%} without {NOISY_SOURCE}")


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


Condition: TypeAlias = Callable[[Row], bool]
PartKind: TypeAlias = Literal["half", "source", "generation"]


@dataclass(frozen=True)
class LeftOut:
    """Rows that a fit leaves out: those whose errors are wanted, and `absent` ones, for whose
    intervals the errors are wanted."""

    condition: Condition
    absent: Condition = lambda row: False
    max_rows: int = MAX_ROWS_PER_SOURCE
    """Largest number of rows of a source that are predicted."""

    def is_left_out(self, row: Row) -> bool:
        return self.condition(row) or self.absent(row)

    def is_predicted(self, row: Row) -> bool:
        return self.condition(row) and not self.absent(row)


def leave_out_each(
    rows: Iterable[Row], get_name: Callable[[Row], str]
) -> list[Callable[[Row], bool]]:
    """Return a condition for each name: a row has it."""
    return [
        lambda row, name=name: get_name(row) == name  # type: ignore[misc]
        for name in sorted({get_name(row) for row in rows})
    ]


def list_parts(
    rows: Sequence[Row], absent: Condition = lambda row: False
) -> dict[PartKind, list[LeftOut]]:
    """List the parts of the rows that are left out once each: halves, sources and accelerator
    generations. Rows that are `absent` are in no fit and in no part."""
    present = [row for row in rows if not absent(row)]
    half = {id(row) for row in split_into_halves(present)[0]}
    conditions: dict[PartKind, list[Condition]] = {
        "half": [lambda row: id(row) in half, lambda row: id(row) not in half],
        "source": leave_out_each(present, lambda row: row.case.source),
        "generation": leave_out_each(present, lambda row: row.case.cluster.accelerator.generation),
    }
    return {
        kind: [LeftOut(condition, absent) for condition in found]
        for kind, found in conditions.items()
    }


def show_errors(title: str, rows: Iterable[Row], errors: Mapping[str, Errors]) -> None:
    """Print a table in Markdown: per source, the errors of step time and memory. `errors`: by id
    of the row."""
    by_source: dict[str, list[Errors]] = defaultdict(list)
    for row in rows:
        by_source[row.case.source].append(errors[row.case.id])
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
