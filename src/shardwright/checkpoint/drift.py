"""Differences between the run that saved a checkpoint and the run that resumes. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MAX_SHOWN_CHARACTERS = 200
"""Longest value in a message; saved values may have any size."""


@dataclass(frozen=True)
class FieldDifference:
    """Field whose value changed; `ABSENT` if one side lacks the field."""

    field: str
    saved: Any
    current: Any

    def __str__(self) -> str:
        return f"{self.field:.200}: saved {_shorten(self.saved)}, now {_shorten(self.current)}"

    def as_json(self) -> dict[str, Any]:
        """Return the difference as JSON for later readers; an absent side is left out."""
        sides = {"saved": self.saved, "current": self.current}
        return {"field": self.field} | {
            side: value for side, value in sides.items() if value is not ABSENT
        }


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()
"""Value of a missing field, as distinct from None."""


def find_differences(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, prefix: str = ""
) -> list[FieldDifference]:
    """Return fields with different values, dotted, sorted by name; tuples equal lists.

    >>> saved = {"seed": 1, "data": {"hash": "a"}}
    >>> [str(d) for d in find_differences(saved, {"seed": 1, "data": {"hash": "b"}})]
    ["data.hash: saved 'a', now 'b'"]
    """
    changed: list[FieldDifference] = []
    for key in sorted({*saved, *current}):
        name = f"{prefix}{key}"
        saved_value = saved.get(key, ABSENT)
        current_value = current.get(key, ABSENT)
        if isinstance(saved_value, Mapping) and isinstance(current_value, Mapping):
            changed += find_differences(saved_value, current_value, prefix=f"{name}.")
        elif _normalise(saved_value) != _normalise(current_value) or isinstance(
            saved_value, bool
        ) != isinstance(current_value, bool):
            changed.append(FieldDifference(name, saved_value, current_value))
    return changed


def split_allowed(
    differences: Sequence[FieldDifference], allowed: Sequence[str], fixed: Mapping[str, str]
) -> tuple[list[FieldDifference], list[str]]:
    """Split differences into those allowed by name and messages about the others.

    Args:
        allowed: names of fields; a name allows all fields below it.
        fixed: fields that cannot be allowed, each with the reason.

    >>> drift = find_differences({"seed": 1, "freeze": []}, {"seed": 2, "freeze": ["a"]})
    >>> split_allowed(drift, ["seed", "freeze"], {"freeze": "its moments differ"})[1]
    ["freeze: saved [], now ['a'] (cannot be allowed: its moments differ)"]
    """
    accepted = []
    refused = []
    for difference in differences:
        reason = next(
            (reason for name, reason in fixed.items() if is_below(difference.field, name)), None
        )
        if reason is None and any(is_below(difference.field, name) for name in allowed):
            accepted.append(difference)
        else:
            refused.append(
                f"{difference} (cannot be allowed: {reason})" if reason else str(difference)
            )
    return accepted, refused


def is_below(name: str, ancestor: str) -> bool:
    """Return True if a dotted name is `ancestor` or below it."""
    return name == ancestor or name.startswith(f"{ancestor}.")


def _normalise(value: Any) -> Any:
    """Return a value with all sequences as lists, at any depth."""
    if isinstance(value, list | tuple):
        return [_normalise(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _normalise(item) for key, item in value.items()}
    return value
