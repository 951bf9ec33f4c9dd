"""`shardwright convert`: a DeepSpeed, Accelerate or Axolotl configuration as a recipe, with all that it could not carry named."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.options import JsonOutput, Overrides
from shardwright.cli.pages import write_text
from shardwright.errors import InputError

SCHEMA_VERSION = 1


def convert_command(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="DeepSpeed's JSON, or Accelerate's or Axolotl's YAML.", show_default=False)
    ],
    system: Annotated[
        str | None,
        typer.Option("--from", help="deepspeed, accelerate or axolotl; default as the file's keys tell.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="RECIPE", help="Write it there.", show_default=False)] = None,
    json_output: JsonOutput = False,
) -> None:
    """Write a recipe from another system's configuration, and say what it does not hold: by key, with why."""
    from shardwright.interop.convert import READERS, convert

    if system is not None and system not in READERS:
        raise InputError("no such system", field="--from", got=system, allowed=", ".join(READERS))
    found = convert(file, system, overrides or ())
    text = found.as_yaml(file.name)
    if out is not None:
        write_text(out, text)
    for item in found.dropped:
        sys.stderr.write(f"not carried: {item.key}: {item.why}\n")
    for remark in found.remarks:
        sys.stderr.write(f"note: {remark}\n")
    if found.needed:
        sys.stderr.write(f"to fill in before it trains: {', '.join(found.needed)} (here with --set, or in the recipe)\n")
    if json_output:
        told = {
            "schema_version": SCHEMA_VERSION,
            "system": found.system,
            "recipe": found.document,
            "needed": list(found.needed),
            "dropped": [asdict(item) for item in found.dropped],
            "notes": list(found.remarks),
            "out": None if out is None else str(out),
        }
        sys.stdout.write(json.dumps(told, default=str) + "\n")
    elif out is None:
        sys.stdout.write(text)
