"""What changed between the run that saved and the run that resumes, field by field. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """A field that is not what it was; a field that one side lacks holds `ABSENT` there."""

    field: str
    saved: Any
    current: Any

    def __str__(self) -> str:
        return f"{self.field}: saved {self.saved!r}, now {self.current!r}"


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()
"""Stands for a field that is not there, which is not the same as None."""


def differences(saved: Mapping[str, Any], current: Mapping[str, Any], *, prefix: str = "") -> list[Difference]:
    """Fields whose values differ, dotted, in order of their names. Tuples equal lists, as JSON has them.

    >>> [str(d) for d in differences({"seed": 1, "data": {"hash": "a"}}, {"seed": 1, "data": {"hash": "b"}})]
    ["data.hash: saved 'a', now 'b'"]
    """
    found: list[Difference] = []
    for key in sorted({*saved, *current}):
        name = f"{prefix}{key}"
        old, new = saved.get(key, ABSENT), current.get(key, ABSENT)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, prefix=f"{name}.")
        elif _plain(old) != _plain(new) or isinstance(old, bool) != isinstance(new, bool):
            found.append(Difference(name, old, new))
    return found


def _plain(value: Any) -> Any:
    """Sequences as lists at any depth."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value
