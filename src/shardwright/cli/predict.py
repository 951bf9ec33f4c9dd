"""`shardwright predict`: compare the planner with published measurements."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.options import JsonOutput
from shardwright.cli.output.json_output import print_json
from shardwright.cli.output.page_output import check_not_input, check_output_file, write_text
from shardwright.errors import DataError, InputError

Measurements = Annotated[
    Path,
    typer.Option(
        "--measurements",
        metavar="FILE.csv",
        help="Table of configurations; columns with results are not read.",
    ),
]
PredictOutput = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="FILE.csv",
        help="Output table: id, pred_tok, pred_mem, fits, and the bounds of their intervals.",
    ),
]

_MAX_SHOWN_IDS = 5
"""Row ids listed per reason; `--json` lists all of them."""


def predict_command(
    measurements: Measurements, out: PredictOutput, as_json: JsonOutput = False
) -> None:
    """Predict tokens/s, memory per GPU and whether it fits for every row of a table.

    Rows that cannot be predicted stay empty in the output and are listed with the reason.
    """
    # Imported here: the catalogue and numpy take time that `--help` does not need.
    from shardwright.planner.published.measurements import (
        extract_configuration,
        read_published_run,
        read_rows,
    )
    from shardwright.planner.published.predictions import OUTPUT_COLUMNS, predict_row

    check_not_input(out, measurements, option="--out", read_by="--measurements")
    check_output_file(out, option="--out")
    rows = read_rows(measurements)
    refused: dict[str, list[str]] = {}
    assumed: dict[str, list[str]] = {}
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, fieldnames=OUTPUT_COLUMNS)
    table.writeheader()
    for row in rows:
        try:
            run = read_published_run(row["id"], extract_configuration(row))
            table.writerow(predict_row(run).as_row())
        except InputError as error:
            refused.setdefault(str(error), []).append(row["id"])
            table.writerow({"id": row["id"]})
        else:
            for assumption in run.assumptions:
                assumed.setdefault(assumption, []).append(row["id"])
    write_text(out, text.getvalue())
    _print_outcome(len(rows), refused, assumed, out, as_json)


def _print_outcome(
    num_rows: int,
    refused: Mapping[str, list[str]],
    assumed: Mapping[str, list[str]],
    out: Path,
    as_json: bool,
) -> None:
    """Print the number of predicted rows, assumptions, and refused rows by reason.

    Raises:
        DataError: no row could be predicted.
    """
    skipped = sum(map(len, refused.values()))
    for groups, outcome in ((assumed, "with an assumption"), (refused, "not predicted")):
        for reason, ids in sorted(groups.items(), key=lambda item: -len(item[1])):
            more = f" and {len(ids) - _MAX_SHOWN_IDS} more" if len(ids) > _MAX_SHOWN_IDS else ""
            rows = "1 row" if len(ids) == 1 else f"{len(ids)} rows"
            sys.stderr.write(
                f"{rows} {outcome} ({', '.join(ids[:_MAX_SHOWN_IDS])}{more}): {reason}\n"
            )
    summary = (
        f"{num_rows - skipped} rows predicted"
        + (f", {skipped} not" if skipped else "")
        + f": {out}"
    )
    (sys.stderr if as_json else sys.stdout).write(summary + "\n")
    if as_json:
        reasons = [{"reason": reason, "ids": ids} for reason, ids in refused.items()]
        content = {
            "predicted": num_rows - skipped,
            "not_predicted": skipped,
            "out": str(out),
            "refused": reasons,
            "assumed": [
                {"assumption": assumption, "ids": ids} for assumption, ids in assumed.items()
            ],
        }
        print_json(content)
    if num_rows and skipped == num_rows:
        raise DataError(
            "none of the rows can be predicted",
            field="--measurements",
            remedy="See the reasons above",
        )
