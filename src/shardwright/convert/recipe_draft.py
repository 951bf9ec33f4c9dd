"""Result of reading another system's file: recipe keys, dropped keys with reasons, missing
keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from shardwright.errors import InputError

TRAINER_AUTO = "auto"
"""Placeholder that Hugging Face's Trainer replaces by a value of its own."""
FP8_NOT_CARRIED = "recipes of 8-bit products differ between systems: set `precision` in the recipe"


@dataclass(frozen=True)
class DroppedKey:
    """A key of the file that has no place in the recipe, and the reason."""

    key: str
    value: Any
    why: str


class SourceDocument:
    """The file as a nested mapping; keys are removed by dotted name as they are read."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._unread = _copy_mapping(document)

    def pop_value(self, key: str, default: Any = None) -> Any:
        """Remove a dotted key and return its value."""
        *parents, last = key.split(".")
        section: Any = self._unread
        for part in parents:
            section = section.get(part) if isinstance(section, dict) else None
        return section.pop(last, default) if isinstance(section, dict) else default

    def pop_number(self, key: str) -> float | None:
        """Remove a dotted key and return its number; None without the key and for `auto`.

        Raises:
            InputError: the value is neither.
        """
        value = self.pop_value(key)
        if value is None or value == TRAINER_AUTO:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise _build_type_error(key, value, "a number")
        return value

    def pop_name(self, key: str, default: str | None = None) -> str | None:
        """Remove a dotted key and return its text.

        Raises:
            InputError: the value is of another type.
        """
        value = self.pop_value(key, default)
        if value is not None and not isinstance(value, str):
            raise _build_type_error(key, value, "text")
        return value

    def pop_mapping(self, key: str) -> dict[str, Any]:
        """Remove a dotted key and return its mapping, empty without the key.

        Raises:
            InputError: the value is of another type.
        """
        value = self.pop_value(key)
        if value is not None and not isinstance(value, dict):
            raise _build_type_error(key, value, "a mapping")
        return value or {}

    def pop_section(self, key: str) -> dict[str, Any]:
        """Remove a section and return its remaining values by dotted name.

        A value that is not a mapping stays for `list_unread`.
        """
        return _flatten(self._unread.pop(key)) if isinstance(self._unread.get(key), dict) else {}

    def __contains__(self, key: str) -> bool:
        return self._unread.get(key) is not None

    def list_unread(self) -> dict[str, Any]:
        """Return all unread values by dotted name, without empty sections."""
        return _flatten(self._unread)


@dataclass
class RecipeDraft:
    """The recipe so far, by dotted keys, and notes on keys that differ, are dropped or
    missing."""

    recipe: dict[str, Any] = field(default_factory=dict)
    dropped: list[DroppedKey] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    missing_keys: list[str] = field(default_factory=list)

    def set_value(self, recipe_key: str, value: Any, source_key: str) -> None:
        """Set a recipe key to the value of a source key.

        None is ignored, except for max_grad_norm, where it disables clipping. `auto` is
        dropped.
        """
        if value == TRAINER_AUTO:
            self.drop(source_key, value, f"Hugging Face's Trainer fills this in; set {recipe_key}")
        elif value is not None or recipe_key == "training.max_grad_norm":
            self.recipe[recipe_key] = value

    def get_value(self, recipe_key: str) -> Any:
        """Return the value of a recipe key, or None."""
        return self.recipe.get(recipe_key)

    def drop(self, key: str, value: Any, reason: str) -> None:
        """Record that a key is not carried over, with the reason."""
        self.dropped.append(DroppedKey(key, value, reason))

    def add_remark(self, text: str) -> None:
        """Record how a carried key differs."""
        self.remarks.append(text)

    def require_keys(self, *recipe_keys: str) -> None:
        """Record required recipe keys that the file does not provide."""
        self.missing_keys += [
            key for key in recipe_keys if key not in self.recipe and key not in self.missing_keys
        ]


def _build_type_error(key: str, value: Any, allowed: str) -> InputError:
    return InputError(
        "wrong type",
        field=key,
        got=repr(value),
        allowed=allowed,
        remedy="Correct the file, or name its system with --from if it is one of another",
    )


def _copy_mapping(value: Any) -> Any:
    return (
        {str(key): _copy_mapping(item) for key, item in value.items()}
        if isinstance(value, Mapping)
        else value
    )


def _flatten(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in section.items():
        name = f"{prefix}{key}"
        flat |= _flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat
