"""`shardwright compare`: compare a run's loss curve with a reference run's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.options import JsonOutput
from shardwright.cli.output.json_output import print_json
from shardwright.errors import ExitCode

SubjectRun = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder to check.")]
ReferenceRun = Annotated[
    Path,
    typer.Argument(
        metavar="REFERENCE",
        help="Run folder of the reference run, e.g. a smaller run or one on a single device.",
    ),
]
ToleranceOption = Annotated[
    float | None,
    typer.Option(
        "--tolerance",
        help="Maximum relative difference of the smoothed losses; default 0.003, or 0.01 if the "
        "runs have different precisions.",
    ),
]
WindowOption = Annotated[
    int | None,
    typer.Option(
        "--window",
        min=1,
        metavar="STEPS",
        help="Steps per average; default a tenth of the compared steps, between 25 and 1000.",
    ),
]


def compare_command(
    run: SubjectRun,
    reference: ReferenceRun,
    tolerance: ToleranceOption = None,
    window: WindowOption = None,
    as_json: JsonOutput = False,
) -> None:
    """Compare training and validation loss with a reference run; exit code 1 beyond the
    tolerance.

    Reports the first step at which the difference exceeds the tolerance.
    """
    # Imported here: importing numpy takes a tenth of a second, which `--help` does not need.
    from shardwright.report.recorded_run import load_runs
    from shardwright.report.run_comparison import compare_runs, describe_comparison

    subject, reference_run = load_runs([run, reference])
    comparison = compare_runs(subject, reference_run, tolerance=tolerance, window_steps=window)
    output = sys.stderr if as_json else sys.stdout
    for loaded_run in (subject, reference_run):
        output.writelines(
            f"note: {loaded_run.name}: {problem}\n" for problem in loaded_run.log.problems
        )
    output.write("\n".join(describe_comparison(comparison)) + "\n")
    if as_json:
        print_json(comparison.as_dict(), allow_nan=False)
    if not comparison.agrees:
        raise typer.Exit(ExitCode.CHECK_FAILED)
