"""Result of reading another system's file: recipe keys, dropped keys with reasons, missing
keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

AUTO = "auto"
"""Placeholder that Hugging Face's Trainer replaces by a value of its own."""


@dataclass(frozen=True)
class Dropped:
    """A key of the file that has no place in the recipe, and the reason."""

    key: str
    value: Any
    why: str


class Source:
    """The file as a nested mapping; keys are removed by dotted name as they are read."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._left = _copied(document)

    def take(self, key: str, default: Any = None) -> Any:
        """Remove a dotted key and return its value."""
        *parents, last = key.split(".")
        section: Any = self._left
        for part in parents:
            section = section.get(part) if isinstance(section, dict) else None
        return section.pop(last, default) if isinstance(section, dict) else default

    def take_all(self, key: str) -> dict[str, Any]:
        """Remove a section and return its remaining values by dotted name.

        A value that is not a mapping stays for `left`.
        """
        return _flattened(self._left.pop(key)) if isinstance(self._left.get(key), dict) else {}

    def __contains__(self, key: str) -> bool:
        return self._left.get(key) is not None

    def left(self) -> dict[str, Any]:
        """Return all unread values by dotted name, without empty sections."""
        return _flattened(self._left)


@dataclass
class Findings:
    """The recipe so far, by dotted keys, and notes on keys that differ, are dropped or
    missing."""

    recipe: dict[str, Any] = field(default_factory=dict)
    dropped: list[Dropped] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    needed: list[str] = field(default_factory=list)

    def put(self, ours: str, value: Any, key: str) -> None:
        """Set a recipe key to the value of a source key.

        None is ignored, except for max_grad_norm, where it disables clipping. `auto` is
        dropped.
        """
        if value == AUTO:
            self.drop(key, value, f"Hugging Face's Trainer fills this in; set {ours}")
        elif value is not None or ours == "training.max_grad_norm":
            self.recipe[ours] = value

    def value(self, ours: str) -> Any:
        """Return the value of a recipe key, or None."""
        return self.recipe.get(ours)

    def drop(self, key: str, value: Any, why: str) -> None:
        """Record that a key is not carried over, with the reason."""
        self.dropped.append(Dropped(key, value, why))

    def remark(self, text: str) -> None:
        """Record how a carried key differs."""
        self.remarks.append(text)

    def need(self, *ours: str) -> None:
        """Record required recipe keys that the file does not provide."""
        self.needed += [key for key in ours if key not in self.recipe and key not in self.needed]


def _copied(value: Any) -> Any:
    return (
        {str(key): _copied(item) for key, item in value.items()}
        if isinstance(value, Mapping)
        else value
    )


def _flattened(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in section.items():
        name = f"{prefix}{key}"
        flat |= _flattened(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat
