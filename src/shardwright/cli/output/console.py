"""Console for tables and coloured lines; it prints all strings literally.

Names of runs, files and parameters, tokens, and error messages may look like rich's markup
(`[/x]`) or contain emoji codes.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from shardwright.control_characters import escape_control_characters


def open_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console that prints text as it is, with control characters escaped."""
    return _LiteralConsole(stderr=stderr, quiet=quiet, highlight=False, markup=False, emoji=False)


class _LiteralConsole(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escape_control_characters(text), **options)
