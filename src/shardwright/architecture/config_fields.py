"""Field-by-field reading of a config.json; a field that no reader knows is an error."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from shardwright.errors import ArchitectureError, suggest_name

Choice = TypeVar("Choice")
MAX_INTEGER = 2**31 - 1
MAX_LAYERS = 10_000


class ConfigFields:
    """Fields of one config.json, or of a mapping inside it.

    `reject_unread` raises for every field that was not read, so a feature that the decoder does
    not compute is never ignored. `amended_fields` holds fields whose value changes when the
    configuration is written back.
    """

    def __init__(self, content: Mapping[str, Any], prefix: str = "") -> None:
        self._content = dict(content)
        self._prefix = prefix
        self._read_names: set[str] = set()
        self.amended_fields: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._content

    def get_path(self, name: str) -> str:
        """Return the field's full name, for messages."""
        return f"{self._prefix}{name}"

    def override(self, name: str, value: Any) -> None:
        """Override the field's value for later reads; the value that is written back stays."""
        self._content[name] = value

    def is_read(self, name: str) -> bool:
        """Return True if the family's reader has read the field."""
        return name in self._read_names

    def read(self, name: str, default: Any = None) -> Any:
        """Read the value without checks; `default` if the field is absent."""
        self._read_names.add(name)
        return self._content.get(name, default)

    def read_integer(
        self, name: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_INTEGER
    ) -> int:
        """Read a whole number from `minimum` to `maximum`.

        An absent or null field has the default value; without a default it is an error.
        """
        value = self._require(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self._build_error(name, value, f"a whole number, at least {minimum}")
        if value > maximum:
            raise self._build_error(name, value, f"a whole number, at most {maximum:,}")
        return value

    def read_num_layers(self, name: str) -> int:
        """Read a number of layers, at most `MAX_LAYERS`: each layer gets a description."""
        return self.read_integer(name, maximum=MAX_LAYERS)

    def read_number(
        self,
        name: str,
        default: float | None = None,
        *,
        is_exclusive: bool = False,
    ) -> float:
        """Read a finite number of at least 0, above it if `is_exclusive`."""
        value = self._require(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._build_error(name, value, "a number")
        if abs(value) > sys.float_info.max or value != value:
            raise self._build_error(name, value, "a finite number")
        if value < 0.0 or (is_exclusive and value == 0.0):
            raise self._build_error(
                name, value, f"a number {'above' if is_exclusive else 'of at least'} 0.0"
            )
        return float(value)

    def read_probability(self, name: str, default: float = 0.0) -> float:
        """Read a dropout rate, 0 <= p < 1."""
        value = self.read_number(name, default)
        if value >= 1.0:
            raise self._build_error(name, value, "a number in [0, 1)")
        return value

    def read_flag(self, name: str, default: bool) -> bool:
        """Read a boolean; null means the default."""
        value = self._require(name, default)
        if not isinstance(value, bool):
            raise self._build_error(name, value, "true or false")
        return value

    def read_choice(self, name: str, allowed: Mapping[str, Choice], default: str) -> Choice:
        """Read one of the keys of `allowed` and return its value there."""
        value = self._require(name, default)
        if not isinstance(value, str) or value not in allowed:
            raise self._build_error(name, value, ", ".join(sorted(allowed)))
        return allowed[value]

    def require_value(self, name: str, allowed: Iterable[Any], reason: str) -> None:
        """Raise with the message `reason` unless the field is absent or has an allowed value."""
        values = list(allowed)
        value = self.read(name, None)
        if name in self._content and not any(
            value is item or (type(value) is type(item) and value == item) for item in values
        ):
            raise ArchitectureError(
                reason,
                field=self.get_path(name),
                got=repr(value),
                allowed=" or ".join(repr(item) for item in values),
                remedy="Use a model without this feature",
            )

    def reject_unread(self, family: str, inert: Iterable[str]) -> None:
        """Raise for the first field that was not read and is not in `inert`."""
        known = self._read_names | set(inert)
        for name, value in self._content.items():
            if name in known:
                continue
            raise ArchitectureError(
                f"this field of a {family} model is not supported, "
                "and ignoring it could change the model's output",
                field=self.get_path(name),
                got=repr(value),
                allowed=", ".join(sorted(self._read_names)),
                remedy=suggest_name(name, self._read_names)
                or "Remove it if it has no effect on the model",
            )

    def _require(self, name: str, default: Any) -> Any:
        value = self.read(name)
        if value is None:
            value = default
        if value is None:
            raise ArchitectureError(
                "the field is missing",
                field=self.get_path(name),
                remedy=f"Add `{self.get_path(name)}` to the model's configuration",
            )
        return value

    def _build_error(self, name: str, value: Any, allowed: str) -> ArchitectureError:
        return ArchitectureError(
            "wrong value", field=self.get_path(name), got=repr(value), allowed=allowed
        )
