"""Text that others wrote, on a terminal: shown as it is, whatever it looks like."""

from __future__ import annotations

import ast
import io
import sys
from pathlib import Path

import pytest
from rich.table import Table

import shardwright
from shardwright.cli.console import open_console
from shardwright.cli.main import run
from shardwright.cli.text_streams import escape_unencodable

ODD = "[/x] [bold]b[/] :smile: \x1b[2J \ud800"


def test_the_console_shows_strings_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="utf-8"))
    escape_unencodable()
    table = Table(ODD, title=ODD)
    table.add_row(ODD)
    console = open_console()
    console.print(table)
    console.print(ODD)
    sys.stdout.flush()
    told = written.getvalue().decode()
    assert "\x1b" not in told
    assert told.count("[/x] [bold]b[/] :smile: ␛[2J \\ud800") == 4


def test_an_error_steers_no_terminal_and_is_written_in_any_encoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(written, encoding="ascii", errors="strict"))
    assert run(["plan", "ü[/x] :smile: \x1b[2J \udcff", "--cluster", "8xH100-80GB"]) == 2
    sys.stderr.flush()
    told = written.getvalue().decode("ascii")
    assert "\\xfc[/x] :smile: \\u241b[2J \\udcff" in told
    assert "Traceback" not in told


def test_no_verb_makes_a_console_of_its_own() -> None:
    """Only these two know how to print foreign text: the verbs' console, and the live line of a
    run.
    """
    root = Path(shardwright.__file__).parent
    makers = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", getattr(node.func, "attr", "")) == "Console"
        )
        or (
            isinstance(node, ast.ClassDef)
            and any(getattr(base, "id", "") == "Console" for base in node.bases)
        )
    }
    assert makers == {"cli/console.py", "telemetry/terminal.py"}
