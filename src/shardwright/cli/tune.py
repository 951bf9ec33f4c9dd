"""`shardwright tune`: find the fastest settings of a recipe by short measured runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.cli.options import JsonOutput, Overrides, ProfilePath, RecipePath
from shardwright.cli.output.json_output import print_json
from shardwright.cli.output.page_output import ShouldOverwrite, check_new_file
from shardwright.config import load_recipe
from shardwright.errors import InputError, Preempted

if TYPE_CHECKING:
    from shardwright.tuning.tuning_result import TuningResult


_UNIT_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}

TunedCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="GPUS",
        help="Devices of this machine, e.g. 8xH100-80GB; default: the recipe's cluster, or "
        "detected.",
    ),
]
NumRanks = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        min=1,
        help="Number of ranks to start on this machine; default one per device of the cluster.",
    ),
]
Budget = Annotated[
    str,
    typer.Option(
        "--budget", metavar="TIME", help="Time limit for the whole search: 90s, 10m, 1.5h."
    ),
]
TrialLimit = Annotated[
    str | None,
    typer.Option(
        "--trial-limit",
        metavar="TIME",
        help="Time limit for one trial. Default: a quarter of the budget; for the first trial, the "
        "whole budget.",
    ),
]
NumSteps = Annotated[
    int, typer.Option("--steps", min=3, help="Number of measured steps in the last round.")
]
NumCandidates = Annotated[
    int, typer.Option("--candidates", min=2, max=200, help="Maximum number of candidates.")
]
FixedSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--fix",
        metavar="SETTING",
        help=(
            "Keep the recipe's value: layout, micro_batch_size, recompute, compile, prefetch, "
            "bucket_size or offload. Repeatable."
        ),
    ),
]
ResultsFolder = Annotated[
    Path | None, typer.Option("--dir", help="Folder for the results; default runs/<name>-tune.")
]
RecipeOutput = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="File for the tuned recipe; default tuned.yaml in the results folder.",
    ),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Continue from the results in the folder.")
]


def tune_command(
    recipe: RecipePath,
    cluster: TunedCluster = None,
    nproc: NumRanks = None,
    profile: ProfilePath = None,
    budget: Budget = "10m",
    trial_limit: TrialLimit = None,
    steps: NumSteps = 64,
    candidates: NumCandidates = 16,
    fix: FixedSettings = None,
    folder: ResultsFolder = None,
    out: RecipeOutput = None,
    overwrite: ShouldOverwrite = False,
    resume: ResumeOption = False,
    overrides: Overrides = None,
    json_output: JsonOutput = False,
) -> None:
    """Try the planner's best settings for a few real steps each; write the fastest as a recipe.

    The global batch stays the same. Ctrl-C ends the running trial and exits with code 4; --resume
    continues.
    """
    budget_seconds = parse_duration(budget, field="--budget")
    max_trial_seconds = (
        None if trial_limit is None else parse_duration(trial_limit, field="--trial-limit")
    )
    check_new_file(out, should_overwrite=overwrite)
    loaded_recipe = load_recipe(recipe, overrides or [])
    from shardwright.cli.output.console import open_console
    from shardwright.cli.output.data_progress import show_data_progress
    from shardwright.cli.output.tune_table import TrialPrinter, print_result
    from shardwright.tuning.public import tune

    console = open_console(stderr=True)
    printer = TrialPrinter(console)
    result = tune(
        loaded_recipe,
        cluster,
        profile=profile,
        num_ranks=nproc,
        budget_seconds=budget_seconds,
        max_trial_seconds=max_trial_seconds,
        num_steps=steps,
        max_candidates=candidates,
        fixed=fix or (),
        folder=folder,
        out=out,
        resume=resume,
        open_progress=show_data_progress,
        on_start=printer.print_start,
        on_trial=printer.print_trial,
    )
    is_stopped = result.ending == "stopped"
    if json_output and not is_stopped:
        print_json({"name": loaded_recipe.name} | result.as_dict())
    else:
        print_result(result, console if json_output else open_console())
    if is_stopped:
        raise Preempted(describe_stop(result))


def describe_stop(result: TuningResult) -> str:
    """Describe a search that a signal stopped."""
    count = sum(each.outcome is not None for each in result.tried)
    return (
        f"{result.stop_cause}: results of {count} candidates are in {result.folder}; "
        "--resume continues"
    )


def parse_duration(text: str, *, field: str) -> float:
    """Return the seconds of a duration.

    Raises:
        InputError: not a duration, or not positive.

    >>> parse_duration("10m", field="--budget"), parse_duration("90", field="--budget")
    (600.0, 90.0)
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([smh]?)", text.strip())
    seconds = float(match[1]) * _UNIT_SECONDS[match[2]] if match else 0.0
    if not seconds > 0:
        raise InputError(
            "not a duration",
            field=field,
            got=text,
            allowed="a positive number with s, m or h, e.g. 90s, 10m, 1.5h",
        )
    return seconds
