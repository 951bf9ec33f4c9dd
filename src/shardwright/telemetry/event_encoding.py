"""Conversion of events to lines of JSON and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from shardwright.errors import InputError, suggest_name
from shardwright.telemetry.event_types import EVENT_TYPES, SCHEMA_VERSION, Event

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Strings for floats that JSON lacks; they are read back as floats."""


def get_event_type(kind: str) -> type[Event]:
    """Return the class of a kind of events.

    Raises:
        InputError: the kind does not exist.
    """
    if kind not in EVENT_TYPES:
        raise InputError(
            "unknown event kind",
            field="kind",
            got=kind,
            allowed=", ".join(EVENT_TYPES),
            remedy=suggest_name(kind, EVENT_TYPES),
        )
    return EVENT_TYPES[kind]


def make_event(kind: str, **values: Any) -> Event:
    """Build an event of a kind.

    Raises:
        InputError: the kind does not exist, or fields are missing or unknown.

    >>> make_event("warning", message="slow disk").message
    'slow disk'
    """
    event_type = get_event_type(kind)
    known = {f.name for f in fields(event_type)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise InputError(
            f"a `{kind}` event has no such field",
            field=unknown[0],
            allowed=", ".join(sorted(known)),
        )
    missing = [f.name for f in fields(event_type) if f.default is MISSING and f.name not in values]
    if missing:
        raise InputError(f"a `{kind}` event needs this field", field=missing[0])
    return event_type(**values)


def encode_event(event: Event) -> str:
    """Encode an event as one line of JSON, without the newline."""
    record: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "kind": event.kind}
    record["time"] = round(event.time, 3)
    record["elapsed_seconds"] = round(event.elapsed_seconds, 4)
    for field in fields(event):
        if field.name not in record:
            value = getattr(event, field.name)
            if value is not None or field.name == "step":
                record[field.name] = value
    try:
        return json.dumps(record, allow_nan=False, ensure_ascii=False)
    except ValueError:
        return json.dumps(_encode_non_finite(record), allow_nan=False, ensure_ascii=False)


def _encode_non_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _encode_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode_non_finite(item) for item in value]
    return value


def _build_field_readers(event_type: type[Event]) -> dict[str, str]:
    """Return the name of the conversion of each field, derived from its type.

    `float` also accepts the strings of non-finite values, lists become tuples; a final `?`
    allows None.
    """

    def reader(type_name: str) -> str:
        return plain_reader(type_name) + ("?" if "None" in type_name else "")

    def plain_reader(type_name: str) -> str:
        for start, name in (
            ("tuple[tuple", "tuples"),
            ("tuple", "tuple"),
            ("dict[str, tuple", "named tuples"),
            ("dict", "dict"),
        ):
            if type_name.startswith(start):
                return name
        return next(
            (name for name in ("float", "bool", "int", "str") if type_name.startswith(name)), ""
        )

    return {field.name: reader(str(field.type)) for field in fields(event_type)}


_JSON_TYPES: dict[str, type] = {"bool": bool, "int": int, "str": str, "dict": dict}
"""Types that JSON represents directly."""

_FIELD_READERS = {
    kind: _build_field_readers(event_type) for kind, event_type in EVENT_TYPES.items()
}


def decode_event(record: Mapping[str, Any]) -> Event:
    """Decode the event of a parsed line; ignores fields that this version does not know.

    Raises:
        KeyError: the kind is unknown. TypeError, ValueError: a field is missing or has another
            type.
    """
    kind = record["kind"]
    event_type = EVENT_TYPES[kind]
    values: dict[str, Any] = {}
    for name, reader in _FIELD_READERS[kind].items():
        if name not in record:
            continue
        value = record[name]
        if value is None and reader.endswith("?"):
            values[name] = None
            continue
        reader = reader.removesuffix("?")
        if reader == "float":
            value = (
                _NON_FINITE[value]
                if isinstance(value, str) and value in _NON_FINITE
                else float(value)
            )
        elif reader in _JSON_TYPES and (
            type(value) is not _JSON_TYPES[reader]
            or (isinstance(value, int) and abs(value) >= 2**63)
        ):
            raise TypeError(f"{name}: {value!r:.60} is not of type {reader}")
        elif reader == "tuple":
            value = tuple(value)
        elif reader == "tuples":
            value = tuple(map(tuple, value))
        elif reader == "named tuples":
            value = {key: tuple(row) for key, row in value.items()}
        values[name] = value
    return event_type(**values)
