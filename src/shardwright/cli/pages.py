"""The option of the verbs that write an HTML page beside what they print, and how it is written: whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.errors import InputError

HtmlOutput = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write the same as one self-contained page, too.", show_default=False)
]


def write_page(path: Path, page: str, *, option: str = "--html") -> None:
    """Put a page in its place.

    Raises:
        InputError: it cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"the page cannot be written: {error.strerror}", field=option, got=str(path)) from error
