"""`shardwright train`: check everything that can be checked here, then start the ranks or be one of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.cli.options import JsonOutput, Overrides, RecipePath, show_log
from shardwright.cli.progress import data_progress
from shardwright.config import load_recipe
from shardwright.errors import CheckFailed, InputError
from shardwright.plan import resolve_degrees
from shardwright.train.ranks import find_ranks
from shardwright.units import format_bytes

if TYPE_CHECKING:
    from shardwright.config import Recipe

SCHEMA_VERSION = 1


def train_command(
    recipe: RecipePath,
    nproc: Annotated[int | None, typer.Option("--nproc", min=1, help="Ranks to start on this machine; default 1.")] = None,
    overrides: Overrides = None,
    layout: Annotated[
        str | None, typer.Option("--layout", metavar="DEGREES", help="Replace the recipe's layout, e.g. dp_shard=2,zero_stage=3.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="Run folder; default runs/<name>.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint of the run folder.")] = False,
    resume_if_begun: Annotated[
        bool, typer.Option("--resume-if-begun", help="Begin, or go on where a run is there: for launchers that start it again.")
    ] = False,
    allow_drift: Annotated[
        list[str] | None,
        typer.Option("--allow-drift", metavar="FIELD", help="With --resume: go on though this has changed. Repeatable."),
    ] = None,
    rehearse_first: Annotated[
        bool, typer.Option("--rehearse-first", help="Rehearse a step before any rank starts; stop where ranks disagree.")
    ] = False,
    json_output: JsonOutput = False,
) -> None:
    """Train: one process, several (--nproc), or as a rank of torchrun or srun. Ctrl-C saves and leaves with exit code 4."""
    if allow_drift and not (resume or resume_if_begun):
        raise InputError("is for a run that goes on", field="--allow-drift", got=", ".join(allow_drift), remedy="Add --resume")
    changes = list(overrides or [])
    if run_dir is not None:
        changes.append(f"run.dir={json.dumps(str(run_dir))}")
    checked = load_recipe(recipe, changes, layout)
    ranks = find_ranks()
    world_size = ranks.world_size if ranks else nproc or 1
    if checked.layout.auto:
        from shardwright.train.automatic import resolve_auto

        show_log()
        checked = resolve_auto(checked, world_size)
    resolve_degrees(checked, world_size)
    if rehearse_first:
        _rehearse(checked, world_size, started=ranks is not None)
    # Torch comes in only now: a wrong recipe is told at once.
    from shardwright.train.start import train

    summary = train(
        checked,
        num_ranks=nproc,
        resume=resume,
        resume_if_begun=resume_if_begun,
        allow_drift=allow_drift or (),
        watching=data_progress,
    )
    if json_output and summary is not None:
        sys.stdout.write(json.dumps({"schema_version": SCHEMA_VERSION, **summary}) + "\n")


def _rehearse(checked: Recipe, world_size: int, *, started: bool) -> None:
    """Rehearse the layout here, and go on only where all its collectives meet and the peak fits the recipe's cluster.

    Raises:
        InputError: a launcher has started the ranks already.
        CheckFailed: ranks disagree, or a rank needs more memory than the devices that the recipe names have.
    """
    if started:
        raise InputError(
            "the ranks are started already",
            field="--rehearse-first",
            got=f"{world_size} ranks of a launcher",
            remedy="Run `shardwright rehearse` once before the launcher, or let `train --nproc` start the ranks",
        )
    from shardwright.cli.console import open_console
    from shardwright.cli.rehearse import rehearse_and_show
    from shardwright.planner.automatic import cluster_of

    memory_bytes = None if checked.cluster is None else cluster_of(checked.cluster, world_size).accelerator.memory_bytes
    result = rehearse_and_show(checked, world_size, open_console(stderr=True))
    if result.disagreement is not None:
        raise CheckFailed(f"ranks disagree: {result.disagreement}")
    if memory_bytes is not None and result.peak_bytes > memory_bytes:
        raise CheckFailed(
            f"a rank's tensors take {format_bytes(result.peak_bytes)}, "
            f"and a device of the recipe's cluster has {format_bytes(memory_bytes)}"
        )
