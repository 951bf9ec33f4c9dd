"""Safe output of arbitrary text: control characters and unencodable characters are escaped."""

from __future__ import annotations

import io
import re
import sys

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters except tab and line feed."""


def escape_control_characters(text: str) -> str:
    r"""Replace control characters except tab and line feed by their Unicode pictures.

    >>> escape_control_characters("a\x1b[2Jb\n")
    'a␛[2Jb\n'
    """
    return _CONTROL_CHARACTERS.sub(_build_control_picture, text)


def _build_control_picture(control: re.Match[str]) -> str:
    number = ord(control[0])
    if number == 0x7F:
        return "␡"
    return chr(0x2400 + number) if number < 0x20 else f"<U+{number:04X}>"


def escape_unencodable() -> None:
    r"""Write characters that a stream cannot encode as `\udc80` instead of raising
    UnicodeEncodeError."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
