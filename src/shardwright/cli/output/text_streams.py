"""Safe output of arbitrary text: characters that a stream cannot encode are escaped."""

from __future__ import annotations

import io
import sys


def escape_unencodable() -> None:
    r"""Write characters that a stream cannot encode as `\udc80` instead of raising
    UnicodeEncodeError."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
