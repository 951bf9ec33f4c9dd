"""Options that several verbs share, so that they are spelled and explained alike."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="The YAML recipe.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a key, e.g. training.learning_rate=1e-4. Repeatable.", show_default=False
    ),
]
JsonOutput = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output; all else on standard error.")]
ModelPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder, or a Hugging Face folder with config.json.", show_default=False)
]
CheckpointChoice = Annotated[str, typer.Option("--checkpoint", help="Of a run: latest, best, or the number of a step.")]


def show_log() -> None:
    """Show what the rooms log on standard error, for verbs that keep no log file."""
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("shardwright").setLevel(logging.INFO)
