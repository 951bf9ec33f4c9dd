"""Text of other origin is shown literally on a terminal."""

from __future__ import annotations

import ast
import io
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

import shardwright
from shardwright.cli.main import run
from shardwright.cli.output.console import open_console, print_table
from shardwright.cli.output.text_streams import escape_unencodable

ANSI = re.compile(r"\x1b\[[0-9;]*m")
MARKUP_AND_CODES = "[/x] [bold]b[/] :smile: \x1b[2J \ud800"


def test_the_console_shows_strings_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="utf-8"))
    escape_unencodable()
    table = Table(MARKUP_AND_CODES, title=MARKUP_AND_CODES)
    table.add_row(MARKUP_AND_CODES)
    console = open_console()
    console.print(table)
    console.print(MARKUP_AND_CODES)
    sys.stdout.flush()
    text = buffer.getvalue().decode()
    assert "\x1b" not in text
    assert text.count("[/x] [bold]b[/] :smile: ␛[2J \\ud800") == 4


def test_an_error_sends_no_terminal_codes_and_fits_any_encoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(buffer, encoding="ascii", errors="strict"))
    assert run(["plan", "ü[/x] :smile: \x1b[2J \udcff", "--cluster", "8xH100-80GB"]) == 2
    sys.stderr.flush()
    text = buffer.getvalue().decode("ascii")
    assert "\\xfc[/x] :smile: \\u241b[2J \\udcff" in text
    assert "Traceback" not in text


def test_no_verb_creates_its_own_console() -> None:
    """Only the verbs' console and the live line of a run can print text of other origin safely."""
    root = Path(shardwright.__file__).parent
    creators = {
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
    assert creators == {"cli/output/console.py", "telemetry/terminal.py"}


def test_verbs_print_tables_that_keep_their_columns() -> None:
    folder = Path(shardwright.__file__).parent / "cli"
    printers = {
        path.name for path in folder.rglob("*.py") if "console.print(table" in path.read_text()
    }
    assert not printers


def test_tables_keep_their_columns_in_narrow_terminals() -> None:
    table = Table("layout", "step", box=None)
    table.add_row("tensor parallelism over 8 ranks", "8.76 ms")
    printed = io.StringIO()
    console = Console(file=printed, width=20)
    print_table(console, table)
    print_table(Console(file=printed, width=200), table)
    assert printed.getvalue().count("tensor parallelism over 8 ranks") == 2
    assert printed.getvalue().count("8.76 ms") == 2


def test_lines_of_tables_have_no_spaces_at_their_ends() -> None:
    table = Table("layout", "step", box=None, pad_edge=False)
    table.add_row("tp=8", "8.76 ms   ", style="bold")
    table.add_row("dp_shard=8 with a long name", None)
    printed = io.StringIO()
    print_table(Console(file=printed, force_terminal=True, color_system="standard"), table)
    lines = [ANSI.sub("", line) for line in printed.getvalue().splitlines()]
    assert [line.split() for line in lines][1] == ["tp=8", "8.76", "ms"]
    assert all(line == line.rstrip() for line in lines)
