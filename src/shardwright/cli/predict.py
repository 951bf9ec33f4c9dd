"""`shardwright predict`: the planner held to measurements that others published."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.options import JsonOutput
from shardwright.errors import InputError

Measurements = Annotated[
    Path,
    typer.Option(
        "--measurements", metavar="FILE.csv", help="Rows of configurations; results in it are not read.", show_default=False
    ),
]
Out = Annotated[
    Path, typer.Option("--out", metavar="FILE.csv", help="Where id, pred_tok, pred_mem and fits are written.", show_default=False)
]


def predict_command(measurements: Measurements, out: Out, as_json: JsonOutput = False) -> None:
    """Predict tokens/s per GPU, memory per GPU and whether it fits, for every row of a table of measurements."""
    # Imported here: the catalogue and numpy cost time that `--help` need not pay.
    from shardwright.planner.measurements import configuration, read_case, read_rows
    from shardwright.planner.published import predict_row

    rows = read_rows(measurements)
    written = skipped = 0
    with open(out, "w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, fieldnames=("id", "pred_tok", "pred_mem", "fits"))
        table.writeheader()
        for row in rows:
            try:
                table.writerow(predict_row(read_case(row["id"], configuration(row))).as_row())
                written += 1
            except InputError as error:
                sys.stderr.write(f"{row['id']}: not predicted: {error}\n")
                table.writerow({"id": row["id"]})
                skipped += 1
    words = f"{written} rows predicted" + (f", {skipped} not" if skipped else "") + f": {out}"
    (sys.stderr if as_json else sys.stdout).write(words + "\n")
    if as_json:
        sys.stdout.write(json.dumps({"schema_version": 1, "predicted": written, "not_predicted": skipped, "out": str(out)}) + "\n")
