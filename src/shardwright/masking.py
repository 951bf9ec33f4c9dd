"""Masking of credentials in texts that are printed, logged or written to files.

The masks err on the side of too much: a part of a URL that may be a password is replaced, even if
a strict reading of RFC 3986 calls it a port and a path.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
"""Text that replaces a credential."""

_SCHEME = r"[A-Za-z][A-Za-z0-9+.\-]*://"
_WHOLE_URL_PASSWORD = re.compile(rf"\A({_SCHEME}(?!arn:)[^/:@]*):(.*)@", re.DOTALL)
_URL_PASSWORD = re.compile(rf"({_SCHEME}(?!arn:)[^\s/:@'\"<>]*):([^\s'\"<>]*)@")
"""Password up to the last `@`: unescaped passwords contain `/` and `@`. The first part of an
Amazon resource name is no user."""
_URL_TOKEN = re.compile(r"(https?://)([^\s/:@'\"<>]+)@")
_QUERY_VALUE = re.compile(
    r"([?&;][^\s=&'\"<>]*(?:sig|token|key|secret|pass|pwd|cred|auth)[^\s=&'\"<>]*=)[^\s&'\"<>]+",
    re.IGNORECASE,
)
_SECRET_NAME = (
    r"(?:secret(?:_?access)?(?:_?key)?|password|passwd|passphrase|private_?key|account_?key"
    r"|access_?key|api_?key|connection_?string"
    r"|(?:session|security|auth|access|refresh|sas|api|bearer)_?token)"
)
_SECRET_KEY = re.compile(rf"(?:(?:\A|.*[_.\-]){_SECRET_NAME}|\Atoken)\Z", re.IGNORECASE)
_SETTING = re.compile(
    rf"(\b(?:[\w.\-]*[_.\-])?{_SECRET_NAME}['\"]?\s*[=:]\s*|['\"]token['\"]\s*:\s*)"
    r"('[^']*'|\"[^\"]*\"|[^\s,;)}\]'\"]+)",
    re.IGNORECASE,
)
_PATH_BEFORE = re.compile(r"[^\s'\"()]*/\Z")
"""Folders in front of a name in a text."""
_NO_SUCH_PATH = re.compile(r"no such (?:file|folder)", re.IGNORECASE)
_AUTHORIZATION = re.compile(
    r"(\bauthorization['\"]?\s*[=:]\s*['\"]?(?:(?:bearer|basic|token)\s+)?)[^\s'\"]+",
    re.IGNORECASE,
)


def mask_secrets(text: str) -> str:
    """Replace the credentials in a text with `***`.

    Masked are passwords in URLs, the values of query parameters whose names contain `sig`, `token`,
    `key` and similar words, and the values of settings such as `secret=...` or `'password': ...`.

    >>> mask_secrets("sftp://u:pa/ss@host/run is closed")
    'sftp://u:***@host/run is closed'
    >>> mask_secrets("https://h/x?sig=abc&part=2")
    'https://h/x?sig=***&part=2'
    >>> mask_secrets("S3FileSystem(key='A', secret='b c')")
    "S3FileSystem(key='A', secret=***)"
    >>> mask_secrets("/etc/passwd: no mapping, password: abc")
    '/etc/passwd: no mapping, password: ***'
    """
    if "://" in text:
        text = _WHOLE_URL_PASSWORD.sub(rf"\1:{MASK}@", text) if _is_url(text) else text
        text = _URL_PASSWORD.sub(rf"\1:{MASK}@", text)
        text = _URL_TOKEN.sub(rf"\1{MASK}@", text)
    text = _QUERY_VALUE.sub(rf"\1{MASK}", text)
    text = _AUTHORIZATION.sub(rf"\1{MASK}", text)
    return _SETTING.sub(_mask_setting, text)


def mask_values(value: Any) -> Any:
    """Return a copy of nested data with the credentials in its texts masked.

    >>> mask_values({"dir": "sftp://u:p@h/x", "storage": {"secret": "abc", "retries": 2}})
    {'dir': 'sftp://u:***@h/x', 'storage': {'secret': '***', 'retries': 2}}
    """
    if isinstance(value, str):
        return mask_secrets(value)
    if isinstance(value, Mapping):
        return {
            key: MASK
            if isinstance(key, str) and isinstance(item, str) and _SECRET_KEY.match(key)
            else mask_values(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(map(mask_values, value))
    return value


def find_url_secrets(url: str) -> list[str]:
    """Return the parts of a URL that are masked, and the parts a URL parser would split them in.

    >>> find_url_secrets("sftp://u:pa/ss@host/run")
    ['pa/ss', 'pa', 'ss']
    """
    password = _WHOLE_URL_PASSWORD.search(url)
    token = _URL_TOKEN.match(url)
    found = [password[2]] if password else [token[2]] if token else []
    found += [match[0].rpartition("=")[2] for match in _QUERY_VALUE.finditer(url)]
    pieces = [piece for secret in found for piece in re.split(r"[/@:?#\[\]]", secret)]
    return list(dict.fromkeys(text for text in (*found, *pieces) if text))


def is_masked(url: str) -> bool:
    """Return True if a URL has a mask instead of a credential.

    >>> is_masked("sftp://u:***@host/run"), is_masked("sftp://host/run")
    (True, False)
    """
    return bool(re.search(rf"{_SCHEME}(?:[^/@]*:)?\*\*\*@|=\*\*\*", url))


class MaskingFormatter(logging.Formatter):
    """Formatter of log lines that masks credentials, those in tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted text of a record, masked."""
        return mask_secrets(super().format(record))


def _mask_setting(match: re.Match[str]) -> str:
    """Mask the value of a setting, unless the name is that of a file in a message: `/etc/passwd: `.

    Only an existing file, or a message that it does not exist, is such a name. Everything else may
    be a setting.
    """
    named, colon, space = match[1].partition(":")
    if colon and space and not space.strip():
        folders = _PATH_BEFORE.search(match.string[: match.start()])
        if folders is not None and (
            os.path.lexists(folders[0] + named) or _NO_SUCH_PATH.match(match.string, match.end(1))
        ):
            return match[0]
    return f"{match[1]}{MASK}"


def _is_url(text: str) -> bool:
    return re.fullmatch(rf"{_SCHEME}\S*", text) is not None
