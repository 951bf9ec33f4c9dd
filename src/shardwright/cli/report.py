"""`shardwright report`: write an HTML page and print a summary of one or more runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.options import JsonOutput
from shardwright.cli.output.json_output import print_json
from shardwright.cli.output.page_output import write_page
from shardwright.errors import InputError

ReportRuns = Annotated[
    list[Path],
    typer.Argument(metavar="RUN", help="Run folders; several are drawn in the same charts."),
]
ReportOutput = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Output page; default report.html in the run folder, or in the current folder for "
        "several runs. With --json, a page is written only if this is set.",
    ),
]


def report_command(runs: ReportRuns, out: ReportOutput = None, as_json: JsonOutput = False) -> None:
    """Write a page with the loss, speed, memory, time breakdown and history of runs; print a
    summary."""
    # Imported here: numpy and the page take a tenth of a second, which `--help` does not need.
    from shardwright.report.recorded_run import load_runs, summarise_run
    from shardwright.report.run_page import render_page
    from shardwright.report.terminal_summary import describe_run
    from shardwright.telemetry.event_types import EVENTS_FILE_NAME

    loaded = load_runs(runs)
    for run in loaded:
        if not run.log.events:
            raise InputError(
                "; ".join(run.log.problems) or f"{run.log.path} has no events",
                field="RUN",
                got=str(run.path),
                allowed=f"the folder of a run, whose {EVENTS_FILE_NAME} `train` has written",
                remedy="`shardwright watch` waits for the events of a run that has not begun",
            )
    summaries = [summarise_run(run) for run in loaded]
    page = (
        out
        if out is not None or as_json
        else (runs[0] if len(runs) == 1 and runs[0].is_dir() else Path()) / "report.html"
    )
    if page is not None:
        write_page(page, render_page(loaded), option="--out")
    output = sys.stderr if as_json else sys.stdout
    for run, summary in zip(loaded, summaries, strict=True):
        output.write("\n".join(describe_run(run, summary)) + "\n")
    if page is not None:
        output.write(f"page: {page}\n")
    if as_json:
        shown_page = None if page is None else str(page)
        print_json({"page": shown_page, "runs": summaries}, allow_nan=False)
