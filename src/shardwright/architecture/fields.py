"""Field-by-field reading of a config.json; a field that no reader knows is an error."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from shardwright.errors import ArchitectureError, nearest

Choice = TypeVar("Choice")
MAX_INTEGER = 2**31 - 1
MAX_LAYERS = 10_000


class Fields:
    """Fields of one config.json, or of a mapping inside it.

    `refuse_rest` raises for every field that was not read, so a feature that the decoder does
    not compute is never ignored. `amended` holds fields whose value changes when the
    configuration is written back.
    """

    def __init__(self, content: Mapping[str, Any], prefix: str = "") -> None:
        self._content = dict(content)
        self._prefix = prefix
        self._taken: set[str] = set()
        self.amended: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._content

    def path(self, name: str) -> str:
        """Return the field's full name, for messages."""
        return f"{self._prefix}{name}"

    def assume(self, name: str, value: Any) -> None:
        """Override the field's value for later reads; the value that is written back stays."""
        self._content[name] = value

    def was_taken(self, name: str) -> bool:
        """Return True if the family's reader has read the field."""
        return name in self._taken

    def take(self, name: str, default: Any = None) -> Any:
        """Read the value without checks; `default` if the field is absent."""
        self._taken.add(name)
        return self._content.get(name, default)

    def integer(
        self, name: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_INTEGER
    ) -> int:
        """Read a whole number from `minimum` to `maximum`.

        An absent or null field has the default value; without a default it is an error.
        """
        value = self._given(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self._wrong(name, value, f"a whole number, at least {minimum}")
        if value > maximum:
            raise self._wrong(name, value, f"a whole number, at most {maximum:,}")
        return value

    def num_layers(self, name: str) -> int:
        """Read a number of layers, at most `MAX_LAYERS`: each layer gets a description."""
        return self.integer(name, maximum=MAX_LAYERS)

    def number(
        self,
        name: str,
        default: float | None = None,
        *,
        minimum: float = 0.0,
        exclusive: bool = False,
    ) -> float:
        """Read a finite number of at least `minimum`, above it if `exclusive`."""
        value = self._given(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "a number")
        if abs(value) > sys.float_info.max or value != value:
            raise self._wrong(name, value, "a finite number")
        if value < minimum or (exclusive and value == minimum):
            raise self._wrong(
                name, value, f"a number {'above' if exclusive else 'of at least'} {minimum}"
            )
        return float(value)

    def probability(self, name: str, default: float = 0.0) -> float:
        """Read a dropout rate, 0 <= p < 1."""
        value = self.number(name, default)
        if value >= 1.0:
            raise self._wrong(name, value, "a number in [0, 1)")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Read a boolean; null stands for the default."""
        value = self._given(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def choice(self, name: str, allowed: Mapping[str, Choice], default: str) -> Choice:
        """Read one of the keys of `allowed` and return its value there."""
        value = self._given(name, default)
        if not isinstance(value, str) or value not in allowed:
            raise self._wrong(name, value, ", ".join(sorted(allowed)))
        return allowed[value]

    def only(self, name: str, allowed: Iterable[Any], why: str) -> None:
        """Raise with the message `why` unless the field is absent or has an allowed value."""
        values = list(allowed)
        value = self.take(name, None)
        if name in self._content and not any(
            value is item or (type(value) is type(item) and value == item) for item in values
        ):
            raise ArchitectureError(
                why,
                field=self.path(name),
                got=repr(value),
                allowed=" or ".join(repr(item) for item in values),
                remedy="Use a model without this feature",
            )

    def refuse_rest(self, family: str, inert: Iterable[str]) -> None:
        """Raise for the first field that was not read and is not in `inert`."""
        known = self._taken | set(inert)
        for name, value in self._content.items():
            if name in known:
                continue
            near = nearest(name, self._taken)
            raise ArchitectureError(
                f"this field of a {family} model is not supported, "
                "and ignoring it could change the model's output",
                field=self.path(name),
                got=repr(value),
                allowed=", ".join(sorted(self._taken)),
                remedy=f"Did you mean `{near}`?"
                if near
                else "Remove it if it has no effect on the model",
            )

    def _given(self, name: str, default: Any) -> Any:
        value = self.take(name)
        if value is None:
            value = default
        if value is None:
            raise ArchitectureError(
                "the field is missing",
                field=self.path(name),
                remedy=f"Add `{self.path(name)}` to the model's configuration",
            )
        return value

    def _wrong(self, name: str, value: Any, allowed: str) -> ArchitectureError:
        return ArchitectureError(
            "wrong value", field=self.path(name), got=repr(value), allowed=allowed
        )
