"""Shorter forms of names, for labels of charts."""

from __future__ import annotations

from collections.abc import Sequence


def shorten_distinctly(names: Sequence[str], length: int) -> dict[str, str]:
    """Shorten names to `length` characters, without a common prefix if they would be equal.

    >>> shorten_distinctly(["sweep-rate-1e-4-long", "sweep-rate-3e-4-long"], 12)
    {'sweep-rate-1e-4-long': '…1e-4-long', 'sweep-rate-3e-4-long': '…3e-4-long'}
    """
    shortened = {name: shorten(name, length) for name in names}
    if len(set(shortened.values())) == len(shortened):
        return shortened
    first = min(shortened)
    last = max(shortened)  # a common prefix of first and last is common to all
    prefix = first[
        : next(
            (index for index, (a, b) in enumerate(zip(first, last, strict=False)) if a != b),
            len(first),
        )
    ]
    begin = max(prefix.rfind(separator) for separator in "-_/. ") + 1
    return {name: shorten("…" + name[begin:] if begin else name, length) for name in shortened}


def shorten(name: str, length: int) -> str:
    """Shorten a name to at most `length` characters.

    >>> shorten("abcdef", 4)
    'abc…'
    """
    return name if len(name) <= length else name[: length - 1] + "…"
