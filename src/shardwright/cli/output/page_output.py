"""Output files of verbs, written atomically: configurations and scripts, which replace nothing by
themselves, and HTML pages, which replace earlier ones."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from shutil import copymode
from typing import Annotated

import typer

from shardwright.errors import InputError
from shardwright.files import detect_file_kind

_OPEN_FILES = (Path("/dev/stdout"), Path("/dev/stderr"))
"""Names of files that this process has open; the name of a regular file may be behind them."""

HtmlOutput = Annotated[
    Path | None,
    typer.Option(
        "--html", metavar="FILE", help="Also write the results as a self-contained HTML page."
    ),
]
ShouldOverwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a file that exists.")]


def check_new_file(path: Path | None, *, should_overwrite: bool, option: str = "--out") -> None:
    """Check that an output file replaces nothing, unless it should; before the work for it.

    Recipes, configurations and scripts are edited after they are written, so a repeated command
    must not replace them. A FIFO or a device such as /dev/stdout is written in any case.

    Raises:
        InputError: the file exists, or there is no file to replace.
    """
    if path is None:
        if should_overwrite:
            raise InputError(
                f"there is no file to replace: {option} is not given",
                field="--overwrite",
                remedy=f"Name the file with {option}, or remove --overwrite",
            )
        return
    if not should_overwrite and not _is_stream(path) and path.exists():
        raise InputError(
            "the file exists",
            field=option,
            got=str(path),
            allowed="a new file",
            remedy="Name another file, or use --overwrite",
        )


def check_not_input(path: Path, source: Path, *, option: str, read_by: str) -> None:
    """Check that an output file is not the input that the verb reads.

    Raises:
        InputError: it is.
    """
    if path.exists() and source.exists() and path.samefile(source):
        raise InputError(
            f"{read_by} reads this file, which would be replaced",
            field=option,
            got=str(path),
            remedy="Name another file",
        )


def check_output_file(path: Path, *, option: str) -> None:
    """Check that a file can be written, before the work whose results it is for; create its
    folder.

    Raises:
        InputError: it cannot be written.
    """
    if _is_stream(path):  # the reader of a FIFO takes its closing for the end
        return
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
        content = text.encode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text contains a character that UTF-8 cannot encode: {error.reason}",
            field=option,
            got=str(path),
        ) from error
    try:
        _write_content(path, content)
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror}", field=option, got=str(path)
        ) from error


def write_page(path: Path, page: str, *, option: str = "--html") -> None:
    """Write an HTML page.

    Raises:
        InputError: the file cannot be written.
    """
    try:  # names may contain lone surrogates
        _write_content(path, page.encode("utf-8", errors="backslashreplace"))
    except OSError as error:
        raise InputError(
            f"the page cannot be written: {error.strerror}", field=option, got=str(path)
        ) from error


def _is_stream(path: Path) -> bool:
    """Return True for a FIFO or a device, also for /dev/stdout that is redirected to a file."""
    absolute = path.absolute()
    if absolute in _OPEN_FILES or absolute.parent == Path("/dev/fd"):
        return True
    return detect_file_kind(path) not in ("regular file", "folder", "absent")


def _write_content(path: Path, content: bytes) -> None:
    """Write a file atomically. A FIFO or a device such as /dev/stdout is written into, since a
    regular file must not take its place."""
    if _is_stream(path):
        with path.open("ab") as stream:  # a file behind /dev/stdout keeps what it has
            stream.write(content)
        return
    path = path.resolve()  # a link stays, and its target is replaced
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content)
        if path.exists():
            copymode(path, partial)
        partial.replace(path)
    except OSError:
        with suppress(OSError):  # of a read-only folder, the error is that of writing
            partial.unlink(missing_ok=True)
        raise
