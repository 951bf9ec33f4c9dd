"""What reading another system's file comes to: keys of a recipe, keys not carried and why, and keys that are still needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

AUTO = "auto"
"""What Hugging Face's Trainer puts its own value in for."""


@dataclass(frozen=True)
class Dropped:
    """A key of the file that the recipe does not hold."""

    key: str
    value: Any
    why: str


class Source:
    """The file as a nested mapping, from which keys are taken by dotted name; what nobody took is left."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._left = _copied(document)

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key, which is gone then."""
        *parents, last = key.split(".")
        here: Any = self._left
        for part in parents:
            here = here.get(part) if isinstance(here, dict) else None
        return here.pop(last, default) if isinstance(here, dict) else default

    def take_all(self, key: str) -> dict[str, Any]:
        """All that is left of a section, by dotted name; what is there in place of a section stays for `left`."""
        return _flattened(self._left.pop(key)) if isinstance(self._left.get(key), dict) else {}

    def __contains__(self, key: str) -> bool:
        return self._left.get(key) is not None

    def left(self) -> dict[str, Any]:
        """All that nobody took, by dotted name; empty sections do not count."""
        return _flattened(self._left)


@dataclass
class Findings:
    """What has been found so far; the recipe's keys are dotted."""

    recipe: dict[str, Any] = field(default_factory=dict)
    dropped: list[Dropped] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    needed: list[str] = field(default_factory=list)

    def put(self, ours: str, value: Any, key: str) -> None:
        """A value for our key, from theirs. None is nothing, but where it switches clipping off; `auto` is another's to fill in."""
        if value == AUTO:
            self.drop(key, value, f"is filled in by Hugging Face's Trainer; give {ours}")
        elif value is not None or ours == "training.max_grad_norm":
            self.recipe[ours] = value

    def value(self, ours: str) -> Any:
        """What our key has, or None."""
        return self.recipe.get(ours)

    def drop(self, key: str, value: Any, why: str) -> None:
        """Say that a key was not carried."""
        self.dropped.append(Dropped(key, value, why))

    def remark(self, text: str) -> None:
        """Say in what a key that was carried differs."""
        self.remarks.append(text)

    def need(self, *ours: str) -> None:
        """Keys that a recipe must have and the file does not say."""
        self.needed += [key for key in ours if key not in self.recipe and key not in self.needed]


def _copied(value: Any) -> Any:
    return {str(key): _copied(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _flattened(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in section.items():
        name = f"{prefix}{key}"
        flat |= _flattened(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat
