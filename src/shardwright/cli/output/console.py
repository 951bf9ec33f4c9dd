"""Console for tables and coloured lines; it prints all strings literally.

Names of runs, files and parameters, tokens, and error messages may look like rich's markup
(`[/x]`) or contain emoji codes.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from shardwright.control_characters import escape_control_characters

_MIN_TABLE_WIDTH = 80


def open_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console that prints text as it is, with control characters escaped."""
    return _LiteralConsole(stderr=stderr, quiet=quiet, highlight=False, markup=False, emoji=False)


def print_table(console: Console, table: Table) -> None:
    """Print a table in the width of the console, but at least in 80 columns.

    rich leaves out columns for which a narrower terminal has no space, names of layouts for
    example. The terminal wraps longer lines.
    """
    options = console.options.update(width=max(console.width, _MIN_TABLE_WIDTH))
    lines = console.render_lines(table, options, pad=False)
    segments = [segment for line in lines for segment in (*line, Segment.line())]
    console.print(Segments(segments), end="", crop=False, soft_wrap=True)


class _LiteralConsole(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escape_control_characters(text), **options)
