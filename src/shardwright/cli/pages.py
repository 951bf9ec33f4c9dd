"""How verbs write files: text for other programs, and an HTML page beside what they print, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwright.errors import InputError

HtmlOutput = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write the same as one self-contained page, too.", show_default=False)
]


def write_text(path: Path, text: str, *, option: str = "--out") -> None:
    """Write a text file; names of files that are no UTF-8 get their own bytes back.

    Raises:
        InputError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise InputError(f"the text has a character that UTF-8 lacks: {error.reason}", field=option, got=str(path)) from error
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", field=option, got=str(path)) from error


def write_page(path: Path, page: str, *, option: str = "--html") -> None:
    """Put a page in its place.

    Raises:
        InputError: it cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(page, encoding="utf-8", errors="backslashreplace")  # lone surrogates of a name
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"the page cannot be written: {error.strerror}", field=option, got=str(path)) from error
