"""Options that several verbs share."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwright.masking import MaskingFormatter

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a recipe key, e.g. training.learning_rate=1e-4. Repeatable.",
    ),
]
JsonOutput = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON object on standard output; all other output goes to standard error.",
    ),
]
ProfilePath = Annotated[
    Path | None, typer.Option("--profile", help="File with rates measured by doctor --calibrate.")
]
ModelPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run folder, or Hugging Face folder with config.json.")
]
CheckpointChoice = Annotated[
    str, typer.Option("--checkpoint", help="Checkpoint of a run: latest, best, or a step number.")
]
DeviceChoice = Annotated[
    str, typer.Option("--device", help="cpu or cuda; auto uses CUDA if available.")
]
DtypeChoice = Annotated[
    str, typer.Option("--dtype", help="fp32, bf16, fp16; auto is fp32 on a CPU, bf16 on CUDA.")
]


def enable_log() -> None:
    """Print the package's log on standard error, for verbs without a log file."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(MaskingFormatter("%(message)s"))
    logging.basicConfig(handlers=[handler])
    logging.getLogger("shardwright").setLevel(logging.INFO)
