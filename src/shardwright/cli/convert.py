"""`shardwright convert`: convert a DeepSpeed, Accelerate or Axolotl configuration to a
recipe."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.options import JsonOutput, Overrides
from shardwright.cli.output.json_output import print_json
from shardwright.cli.output.page_output import ShouldOverwrite, check_new_file, write_text
from shardwright.errors import InputError


def convert_command(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="Configuration: DeepSpeed JSON, or Accelerate or Axolotl YAML."
        ),
    ],
    system: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="deepspeed, accelerate or axolotl; default: detected from the file's keys.",
        ),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="RECIPE", help="Output file; default standard output."),
    ] = None,
    overwrite: ShouldOverwrite = False,
    json_output: JsonOutput = False,
) -> None:
    """Convert another system's configuration to a recipe; list the keys not carried over, and
    why."""
    from shardwright.convert.conversion import CONFIG_READERS, convert

    if system is not None and system not in CONFIG_READERS:
        raise InputError(
            "unknown system", field="--from", got=system, allowed=", ".join(CONFIG_READERS)
        )
    check_new_file(out, should_overwrite=overwrite)
    converted = convert(file, system, overrides or ())
    text = converted.as_yaml(file.name)
    if out is not None:
        write_text(out, text)
    # The comments of the printed recipe list the same; in a terminal both would be seen.
    is_listed = out is None and not json_output and sys.stdout.isatty()
    for item in () if is_listed else converted.dropped:
        sys.stderr.write(f"not carried: {item.key}: {item.why}\n")
    for remark in () if is_listed else converted.remarks:
        sys.stderr.write(f"note: {remark}\n")
    if converted.missing_keys:
        sys.stderr.write(
            f"missing keys: {', '.join(converted.missing_keys)} (give them with --set, "
            "or add them to the recipe)\n"
        )
    if json_output:
        content = {
            "system": converted.system,
            "recipe": converted.document,
            "needed": list(converted.missing_keys),
            "dropped": [asdict(item) for item in converted.dropped],
            "notes": list(converted.remarks),
            "out": None if out is None else str(out),
        }
        print_json(content, default=str)
    elif out is None:
        sys.stdout.write(text)
