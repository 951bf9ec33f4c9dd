"""JSON output of verbs (`--json`), and the end of a verb whose check fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import typer

from shardwright.errors import CheckFailed, ExitCode

SCHEMA_VERSION = 1
"""Version of the objects of all verbs; a change that breaks a reader increases it."""


def print_json(content: Mapping[str, object], **encoding: Any) -> None:
    """Print one JSON object with its `schema_version` on standard output."""
    text = json.dumps({"schema_version": SCHEMA_VERSION, **content}, **encoding)
    sys.stdout.write(text + "\n")


def fail_check(message: str, *, json_output: bool) -> NoReturn:
    """End a verb with exit code 1; under --json its object replaces the message."""
    if json_output:
        raise typer.Exit(ExitCode.CHECK_FAILED)
    raise CheckFailed(message)
