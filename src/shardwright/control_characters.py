"""Escapes of control characters, by which texts of others could affect a terminal."""

from __future__ import annotations

import re

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
