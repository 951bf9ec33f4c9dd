"""Console for tables and coloured lines; it prints all strings literally.

Names of runs, files and parameters, tokens, and error messages may look like rich's markup
(`[/x]`) or contain emoji codes.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.text import Text

from shardwright.control_characters import escape_control_characters

_MIN_TABLE_WIDTH = 80


def open_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console that prints text as it is, with control characters escaped."""
    return _LiteralConsole(stderr=stderr, quiet=quiet, highlight=False, markup=False, emoji=False)


def print_table(
    console: Console, table: RenderableType, *, min_width: int = _MIN_TABLE_WIDTH
) -> None:
    """Print a table without spaces at the ends of its lines.

    rich leaves out columns for which a narrow terminal has no space, names of layouts for example.
    So the table has at least `min_width` columns, and the terminal wraps longer lines.
    """
    options = console.options.update(width=max(console.width, min_width))
    lines = console.render_lines(table, options, pad=False)
    segments = [segment for line in lines for segment in (*_strip_end(line), Segment.line())]
    console.print(Segments(segments), end="", crop=False, soft_wrap=True)


def _strip_end(line: list[Segment]) -> list[Segment]:
    """Return a line without the spaces with which rich fills its last columns."""
    stripped = list(line)
    while stripped:
        last = stripped.pop()
        if text := last.text.rstrip(" "):
            return [*stripped, Segment(text, last.style)]
    return []


class _LiteralConsole(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escape_control_characters(text), **options)
