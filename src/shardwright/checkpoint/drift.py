"""What changed between the run that saved and the run that resumes, field by field. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SHOWN_CHARACTERS = 200
"""Of a value in a message: what was saved may be of any size."""


@dataclass(frozen=True)
class Difference:
    """A field that is not what it was; a field that one side lacks holds `ABSENT` there."""

    field: str
    saved: Any
    current: Any

    def __str__(self) -> str:
        return f"{self.field:.200}: saved {_shortened(self.saved)}, now {_shortened(self.current)}"

    def as_json(self) -> dict[str, Any]:
        """For a later reader; a side that is absent is left out."""
        sides = {"saved": self.saved, "current": self.current}
        return {"field": self.field} | {side: value for side, value in sides.items() if value is not ABSENT}


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


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


def split_allowed(
    found: Sequence[Difference], allowed: Sequence[str], fixed: Mapping[str, str]
) -> tuple[list[Difference], list[str]]:
    """Differences that a person allowed by name, and the others as they are refused, field by field.

    Args:
        allowed: names of fields; a name allows all below it.
        fixed: names that cannot be allowed, each with the reason.

    >>> drift = differences({"seed": 1, "freeze": []}, {"seed": 2, "freeze": ["a"]})
    >>> split_allowed(drift, ["seed", "freeze"], {"freeze": "its moments are others"})[1]
    ["freeze: saved [], now ['a'] (cannot be allowed: its moments are others)"]
    """
    taken, refused = [], []
    for difference in found:
        reason = next((reason for name, reason in fixed.items() if _is_below(difference.field, name)), None)
        if reason is None and any(_is_below(difference.field, name) for name in allowed):
            taken.append(difference)
        else:
            refused.append(f"{difference} (cannot be allowed: {reason})" if reason else str(difference))
    return taken, refused


def _is_below(name: str, above: str) -> bool:
    return name == above or name.startswith(f"{above}.")


def _plain(value: Any) -> Any:
    """Sequences as lists at any depth."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value
