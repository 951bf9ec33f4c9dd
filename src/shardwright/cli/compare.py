"""`shardwright compare`: one run's loss curve held against another's; exit code 1 where it leaves it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.options import JsonOutput
from shardwright.errors import ExitCode

Subject = Annotated[Path, typer.Argument(metavar="RUN", help="The run folder in question.", show_default=False)]
Reference = Annotated[
    Path, typer.Argument(metavar="REFERENCE", help="The run folder to trust: smaller, or on one device.", show_default=False)
]
Tolerance = Annotated[float, typer.Option("--tolerance", help="Relative difference of the smoothed losses that is let pass.")]
Window = Annotated[
    int | None,
    typer.Option(
        "--window",
        min=1,
        metavar="STEPS",
        help="Steps averaged; default a tenth of those compared, 25 to 1000.",
        show_default=False,
    ),
]


def compare_command(
    run: Subject, reference: Reference, tolerance: Tolerance = 0.003, window: Window = None, as_json: JsonOutput = False
) -> None:
    """Hold a run's training and validation loss against a reference's, and say where it first leaves the tolerance."""
    # Imported here: numpy costs a tenth of a second that `--help` need not pay.
    from shardwright.report.compare import compare_runs, describe_comparison
    from shardwright.report.runs import load_runs

    subject, trusted = load_runs([run, reference])
    comparison = compare_runs(subject, trusted, tolerance=tolerance, window_steps=window)
    words = sys.stderr if as_json else sys.stdout
    for each in (subject, trusted):
        words.writelines(f"note: {each.name}: {problem}\n" for problem in each.log.problems)
    words.write("\n".join(describe_comparison(comparison)) + "\n")
    if as_json:
        sys.stdout.write(json.dumps(comparison.as_dict(), allow_nan=False) + "\n")
    if not comparison.agrees:
        raise typer.Exit(ExitCode.CHECK_FAILED)
