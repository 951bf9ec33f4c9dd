"""Output files of verbs: text for other programs, and HTML pages, which are replaced
atomically."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from shardwright.errors import InputError

HtmlOutput = Annotated[
    Path | None,
    typer.Option(
        "--html", metavar="FILE", help="Also write the results as a self-contained HTML page."
    ),
]


def check_output_file(path: Path, *, option: str) -> None:
    """Check that a file can be written, before the work whose results it is for; create its
    folder.

    Raises:
        InputError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror}",
            field=option,
            got=str(path),
            remedy="Name a file that is writable",
        ) from error


def write_text(path: Path, text: str, *, option: str = "--out") -> None:
    """Write a text file; file names that are not valid UTF-8 keep their original bytes.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text contains a character that UTF-8 cannot encode: {error.reason}",
            field=option,
            got=str(path),
        ) from error
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror}", field=option, got=str(path)
        ) from error


def write_page(path: Path, page: str, *, option: str = "--html") -> None:
    """Write an HTML page atomically.

    Raises:
        InputError: the file cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(
            page, encoding="utf-8", errors="backslashreplace"
        )  # lone surrogates of a name
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):  # of a read-only folder, the error is that of writing
            partial.unlink(missing_ok=True)
        raise InputError(
            f"the page cannot be written: {error.strerror}", field=option, got=str(path)
        ) from error
