"""`shardwright train`: validate the recipe, then start the ranks, or run as one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.cli.options import JsonOutput, Overrides, RecipePath, enable_log
from shardwright.cli.output.data_progress import show_data_progress
from shardwright.cli.output.json_output import print_json
from shardwright.config import load_recipe
from shardwright.errors import CheckFailed, InputError
from shardwright.launch.rank_environment import detect_rank_environment
from shardwright.launch.stop_signals import ignore_stop_signals
from shardwright.units import format_bytes

if TYPE_CHECKING:
    from shardwright.config import Recipe


def train_command(
    recipe: RecipePath,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=1, help="Number of ranks to start on this machine; default 1."),
    ] = None,
    overrides: Overrides = None,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            metavar="DEGREES",
            help="Replace the recipe's layout, e.g. dp_shard=2,zero_stage=3.",
        ),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Run folder; default runs/<name>.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Resume from the newest complete checkpoint in the run folder."
        ),
    ] = False,
    resume_if_begun: Annotated[
        bool,
        typer.Option(
            "--resume-if-begun",
            help="Resume if the run folder contains a run, else start one; for launchers that "
            "restart jobs.",
        ),
    ] = False,
    allow_drift: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-drift",
            metavar="FIELD",
            help="With --resume: accept a change of this recipe field. Repeatable.",
        ),
    ] = None,
    rehearse_first: Annotated[
        bool,
        typer.Option(
            "--rehearse-first",
            help="Rehearse a step before any rank starts; stop if collectives do not match.",
        ),
    ] = False,
    json_output: JsonOutput = False,
) -> None:
    """Train in one process, in several (--nproc), or as a rank of torchrun or srun.

    Ctrl-C saves a checkpoint after the current step and exits with code 4; a second one exits
    without saving.
    """
    if allow_drift and not (resume or resume_if_begun):
        raise InputError(
            "applies only to a resumed run",
            field="--allow-drift",
            got=", ".join(allow_drift),
            remedy="Add --resume",
        )
    from shardwright.launch.world_sizes import resolve_training_layout

    changes = list(overrides or [])
    if run_dir is not None:
        changes.append(f"run.dir={json.dumps(str(run_dir))}")
    loaded_recipe = load_recipe(recipe, changes, layout)
    planned_from = loaded_recipe if loaded_recipe.layout.auto else None
    if planned_from is not None:
        enable_log()
    loaded_recipe, world_size = resolve_training_layout(loaded_recipe, nproc)
    if rehearse_first:
        is_launched = detect_rank_environment() is not None
        _rehearse_first(loaded_recipe, world_size, is_launched=is_launched)
    # Torch is imported after the recipe is validated, so that errors in it appear at once.
    from shardwright.training.run import train

    try:
        summary = train(
            loaded_recipe,
            num_ranks=nproc,
            resume=resume,
            resume_if_started=resume_if_begun,
            allow_drift=allow_drift or (),
            open_progress=show_data_progress,
            planned_from=planned_from,
        )
    finally:
        if detect_rank_environment() is not None:
            # The launcher counts a rank that a signal kills as lost, even if its run is finished.
            ignore_stop_signals()
    if json_output and summary is not None:
        print_json(summary)


def _rehearse_first(recipe: Recipe, world_size: int, *, is_launched: bool) -> None:
    """Rehearse the layout; return if its collectives match and its peak fits the recipe's
    cluster.

    Raises:
        InputError: a launcher has already started the ranks.
        CheckFailed: collectives do not match, or a rank needs more memory than a device has.
    """
    if is_launched:
        raise InputError(
            "the ranks have already been started",
            field="--rehearse-first",
            got=f"{world_size} ranks from a launcher",
            remedy=(
                "Run `shardwright rehearse` before the launcher, "
                "or start the ranks with `train --nproc`"
            ),
        )
    from shardwright.cli.output.console import open_console
    from shardwright.cli.rehearse import rehearse_and_print
    from shardwright.planner.auto_layout import build_cluster

    memory_bytes = (
        None
        if recipe.cluster is None
        else build_cluster(recipe.cluster, world_size).accelerator.memory_bytes
    )
    result = rehearse_and_print(recipe, world_size, open_console(stderr=True))
    if result.disagreement is not None:
        raise CheckFailed(f"the ranks' collectives do not match: {result.disagreement}")
    if memory_bytes is not None and result.peak_bytes > memory_bytes:
        raise CheckFailed(
            f"the tensors of one rank need {format_bytes(result.peak_bytes)}, but "
            f"a device of the recipe's cluster has {format_bytes(memory_bytes)}"
        )
