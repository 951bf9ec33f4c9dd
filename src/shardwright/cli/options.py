"""Options that several verbs share, so that they are spelled and explained alike."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="The YAML recipe.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key, e.g. training.learning_rate=1e-4. Repeatable.", show_default=False),
]
JsonOutput = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output; all else on standard error.")]
