"""`shardwright report`: one self-contained HTML page from the events of runs, and a summary in the terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.options import JsonOutput
from shardwright.cli.pages import write_page

SCHEMA_VERSION = 1

Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN", help="Run folders; several are laid over each other.", show_default=False)
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Where the page goes; default report.html in the run folder, in this folder for several runs. "
        "Under --json a page is written only when this is given.",
        show_default=False,
    ),
]


def report_command(runs: Runs, out: Out = None, as_json: JsonOutput = False) -> None:
    """Show what happened in a run: loss, speed, memory, time by part, history."""
    # Imported here: numpy and the page cost a tenth of a second that `--help` need not pay.
    from shardwright.report.page import render_page
    from shardwright.report.runs import load_runs, summarise
    from shardwright.report.words import describe_run

    loaded = load_runs(runs)
    summaries = [summarise(run) for run in loaded]
    page = out if out is not None or as_json else (runs[0] if len(runs) == 1 and runs[0].is_dir() else Path()) / "report.html"
    if page is not None:
        write_page(page, render_page(loaded), option="--out")
    words = sys.stderr if as_json else sys.stdout
    for run, summary in zip(loaded, summaries, strict=True):
        words.write("\n".join(describe_run(run, summary)) + "\n")
    if page is not None:
        words.write(f"page: {page}\n")
    if as_json:
        told = {"schema_version": SCHEMA_VERSION, "page": None if page is None else str(page), "runs": summaries}
        sys.stdout.write(json.dumps(told, allow_nan=False) + "\n")
