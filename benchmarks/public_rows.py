"""Errors of the planner on public rows that no fit uses.

    python -m benchmarks.public_rows                  # errors by kind of run
    python -m benchmarks.public_rows --by source      # by source
    python -m benchmarks.public_rows --rows           # each row

docs/benchmarks/public-rows.csv has the rows with their sources. Its columns `first_...` are the
predictions before anyone had seen an error of the row (held out), made at the state of the planner
that the decision record in `decision` changed.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.planner_rows import format_bias, format_mean, format_share, parse_number
from shardwright.planner.published.measurements import (
    extract_configuration,
    read_published_run,
    read_rows,
)
from shardwright.planner.published.predictions import predict_row

ROWS = Path(__file__).parents[1] / "docs/benchmarks/public-rows.csv"
FIRST_PREFIX = "first_"
"""Prefix of the columns with a row's held-out prediction, which are those of `predict`."""


@dataclass(frozen=True)
class PublicError:
    """Error of one prediction of one row.

    `time`: measured over predicted throughput, minus one. `memory`: predicted over measured, minus
    one. `time_inside`, `memory_inside`: the measurement is inside the 80% interval. None if not
    measured.
    """

    time: float | None
    time_inside: bool | None
    memory: float | None
    memory_inside: bool | None


def compute_error(row: Mapping[str, str], prediction: Mapping[str, str]) -> PublicError:
    """Compute the error of a prediction with the columns of `shardwright predict`."""
    speed = parse_number(row["tokens_per_sec_per_gpu"])
    memory = parse_number(row["peak_memory_gib_per_gpu"])
    return PublicError(
        time=speed / float(prediction["pred_tok"]) - 1 if speed else None,
        time_inside=_is_inside(speed, prediction, "pred_tok"),
        memory=float(prediction["pred_mem"]) / memory - 1 if memory else None,
        memory_inside=_is_inside(memory, prediction, "pred_mem"),
    )


def _is_inside(measured: float | None, prediction: Mapping[str, str], name: str) -> bool | None:
    if measured is None:
        return None
    return float(prediction[f"{name}_low"]) <= measured <= float(prediction[f"{name}_high"])


def read_first_prediction(row: Mapping[str, str]) -> dict[str, str]:
    """Return the columns of a row's held-out prediction, named as those of `predict`."""
    return {
        name.removeprefix(FIRST_PREFIX): text
        for name, text in row.items()
        if name.startswith(FIRST_PREFIX)
    }


def predict_now(row: Mapping[str, str]) -> dict[str, str]:
    """Predict a row with the current planner."""
    return predict_row(read_published_run(row["id"], extract_configuration(row))).as_row()


def describe_errors(errors: Sequence[PublicError]) -> list[str]:
    """Return cells of a table: rows, error and coverage of the step time, and of memory."""
    cells: list[str] = []
    for values, inside in (
        ([e.time for e in errors], [e.time_inside for e in errors]),
        ([e.memory for e in errors], [e.memory_inside for e in errors]),
    ):
        known = [value for value in values if value is not None]
        cells += [
            str(len(known)),
            format_mean(known),
            format_bias(known),
            format_share(each for each in inside if each is not None),
        ]
    return cells


def write_table(
    errors: Iterable[tuple[str, PublicError]], title: str, total: str = "all"
) -> list[str]:
    """Return the lines of a Markdown table: one line per group, and one for all rows."""
    groups: dict[str, list[PublicError]] = defaultdict(list)
    for group, error in errors:
        groups[group].append(error)
    everything = [error for group in groups.values() for error in group]
    header = (
        title,
        "rows",
        "step time",
        "bias",
        "inside",
        "memory rows",
        "memory",
        "bias",
        "inside",
    )
    lines = [f"| {' | '.join(header)} |", f"|---{'|---:' * 8}|"]
    for name, members in (*sorted(groups.items()), (total, everything)):
        lines.append(f"| {' | '.join([name, *describe_errors(members)])} |")
    return lines


def show_row(row: Mapping[str, str], error: PublicError) -> str:
    """Return one line with a row's settings and errors."""
    time = "" if error.time is None else f"{100 * error.time:+.1f}%"
    memory = "" if error.memory is None else f"{100 * error.memory:+.1f}%"
    settings = (row["model_name"], f"{row['gpus']}x{row['gpu']}", row["seq_len"], row["notes"])
    return f"{row['id']:28} time {time:>8} memory {memory:>8}  {', '.join(settings)}"


def main() -> None:
    """Print the errors of held-out and current predictions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--by", choices=("kind", "source"), default="kind")
    parser.add_argument("--decision", help="only rows that were new for this decision record")
    parser.add_argument("--rows", action="store_true", help="print each row of the current planner")
    parser.add_argument("--out", type=Path, help="write the current predictions to this table")
    arguments = parser.parse_args()
    rows = [row for row in read_rows(ROWS) if arguments.decision in (None, row["decision"])]
    group = "kind" if arguments.by == "kind" else "source_group"
    now = {row["id"]: predict_now(row) for row in rows}
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, fieldnames=list(next(iter(now.values()))))
            table.writeheader()
            table.writerows(now.values())
    for name, predictions in (
        ("held out", {row["id"]: read_first_prediction(row) for row in rows}),
        ("current planner (not held out)", now),
    ):
        print(f"\n{name}\n")
        errors = [(row[group], compute_error(row, predictions[row["id"]])) for row in rows]
        print("\n".join(write_table(errors, arguments.by)))
    if arguments.rows:
        for row in rows:
            print(show_row(row, compute_error(row, now[row["id"]])))


if __name__ == "__main__":
    main()
